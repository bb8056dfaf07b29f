"""200 000 rows, 3 % of them bad: exact counts in a bounded memory; prints what it took. `make test-slow`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sharegpt import write_sharegpt

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
pytestmark = pytest.mark.slow

CHILD = """
import json, resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from styles import template_tokenizer
from data.artifact import open_stage
from data.chat import Template
from data.prepare import DataConfig, prepare
folder = Path(sys.argv[1])
stage = open_stage(folder / "out", "prepare", {}, {})
start = time.monotonic()
config = DataConfig(["x"], str(folder / "a.jsonl"), max_prompt_tokens=4096)
prepare(config, Template(template_tokenizer("smollm2")), 8192, False, stage, lambda _: None, lambda *_: None)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"counts": stage.counts, "seconds": time.monotonic() - start, "peak": peak}))
"""


def test_two_hundred_thousand_rows(tmp_path, capsys):
    count = 200_000
    faults = write_sharegpt(tmp_path / "a.jsonl", count - 1, cut=True)
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(ROOT / "tests")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    counts = found["counts"]
    assert counts["reasons"] == dict(faults)
    assert counts["rows"] == count == counts["train"] + counts["heldout_of_these_rows"] + counts["rejected"]
    assert found["peak"] < 2 * GIB
    with capsys.disabled():
        size = (tmp_path / "a.jsonl").stat().st_size / 1e6
        print(f"\n200 000 rows ({size:.0f} MB): {found['seconds']:.0f} s, peak {found['peak'] / GIB:.2f} GiB")
