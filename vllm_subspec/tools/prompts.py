"""Prompts of our own for measurements: prose, code, facts, lists, dialogue."""

PROMPTS = (
    "Explain in simple words why the sky is blue and why sunsets are red.",
    "Write a Python function that returns the n-th Fibonacci number and explain each line.",
    "Tell me a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between a virus and a bacterium?",
    "Give me a recipe for a simple vegetable soup, step by step.",
    "Summarise how a bill becomes a law in a parliamentary democracy.",
    "List ten tips for learning a new language and say why each one helps.",
    "Describe the water cycle to a ten-year-old child.",
    "Write a polite letter to a neighbour who plays loud music at night.",
    "Explain how a bicycle stays upright while it is moving.",
    "Compare trains and aeroplanes for a journey of five hundred kilometres.",
    "Write a dialogue between a teacher and a student about why mathematics matters.",
)
