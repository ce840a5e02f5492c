"""The only room that imports vLLM."""
