"""A seeded request gives the same tokens in another process that loads the same core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helios_jax import LLM, SamplingParams

PROMPT = [5, 17, 40, 99, 3]
SETTINGS = {"temperature": 1.0, "top_p": 0.95, "seed": 42, "max_tokens": 40, "ignore_eos": True}
SCRIPT = """
import json, sys
from helios_jax import LLM, SamplingParams
core, prompt, settings = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
with LLM(core=core, progress=False) as llm:
    print(json.dumps(llm.generate([prompt], SamplingParams(**settings))[0].outputs[0].token_ids))
"""


def test_seeded_tokens_survive_a_new_process(tiny_core_dir: Path) -> None:
    """Case R1."""
    with LLM(core=tiny_core_dir, progress=False) as llm:
        noise = SamplingParams(temperature=1.3, max_tokens=40, ignore_eos=True)
        beside = llm.generate([[i + 3] for i in range(7)] + [PROMPT], [noise] * 7 + [SamplingParams(**SETTINGS)])
    command = [sys.executable, "-c", SCRIPT, str(tiny_core_dir), json.dumps(PROMPT), json.dumps(SETTINGS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == beside[-1].outputs[0].token_ids
