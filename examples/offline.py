"""Offline use: a list of prompts, their continuations.  python examples/offline.py"""

from helios_jax import LLM, SamplingParams

PROMPTS = ["Once upon a time, in a small village by the sea,", "The three laws of thermodynamics are"]

if __name__ == "__main__":
    with LLM(model="smollm2", max_slots=2, max_context=512) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40)):
            print(f"{output.prompt}\033[1m{output.outputs[0].text}\033[0m\n")
