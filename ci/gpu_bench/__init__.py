"""`ci/gpu`: checks and measures the CUDA path on a bare machine, with torch and Triton alone.

1. `checks`, `sanitizer`: the gate. What is wrong is told, and then no speed.
2. `roofline`: what the machine can do at most, measured.
3. `timings` (against `rivals`), `link` and `method` (on `model`): how near to that we come.
4. `report`: tables and JSON. `device` has the GPU, and the stand-in of a dry run.
"""
