"""python -m train as a user types it: mistakes, the whole pipeline on a tiny target, a second run, an interrupt."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from data.artifact import claim

ROOT = Path(__file__).parents[2]


def command(out, folder, *extra):
    prompts = out.parent / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text("".join(json.dumps({"prompt": f"say {i} and {i + 1}"}) + "\n" for i in range(14)))
    return [
        *(sys.executable, "-m", "train", f"target.source={folder}", "target.name=tiny", f"out={out}"),
        *("data=jsonl", f"data.path={prompts}", "data.heldout=3", "data.domains=[mine]"),
        *("distill.max_new_tokens=12", "distill.batch_size=5", "drafter.model.draft_vocab_size=64"),
        *("drafter.tree.depth=3", "fit.max_steps=6", "fit.save_steps=2", "eval.max_new_tokens=8"),
        *("eval.own=2", "eval.transfer=1", *extra),
    ]


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def run(*arguments):
    return subprocess.run(arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


def train(*overrides):
    return run(sys.executable, "-m", "train", *overrides)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fit.lrr=1"], "unknown config key 'fit.lrr'. Did you mean 'fit.lr'?"),
        (["+fit.foo=1"], "unknown config key 'fit.foo'"),
        (["fit.lr=fast"], "fit.lr"),
        (["target=nonsense"], "nonsense"),
        (["target.source=no/such/model"], "target.source: 'no/such/model' is not there"),
        (["target.source=absent.gguf"], "target.source: no file absent.gguf"),
        (["data=jsonl"], "data.path"),
        (["data=jsonl", "data.path=absent.jsonl"], "data.path: no file absent.jsonl"),
        (["data.domains=[math]"], "data.domains: 'math'"),
        (["stages=[fitt]"], "stages: 'fitt' is not a stage"),
        (["drafter.tree.depth=0"], "tree.depth"),
        (["drafter.objective.loss=x"], "drafter.objective.loss: 'x'"),
        (["stages=[fit"], "fit"),
        (["stages=[]"], "stages is empty"),
        (["seed=-1"], "seed must be from 0"),
        (["capture=true"], "capture is a group of keys"),
        (["data=jsonl", "data.path=a=b.jsonl"], "Quote values with other letters twice"),
        (["data=mixture", "data.sources=[{path: a.jsonl, wieght: 1}]"], "data.sources: unknown key 'wieght'"),
        (["data=mixture", "data.sources=[]"], "give data.path, data.sources or data.domains"),
        (["distill.server.url=http://a:port/v1"], "distill.server.url is no address"),
        (["distill.temperatures=[.nan]"], "distill.temperatures"),
        (["fit.lr=nan"], "fit.lr"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, overrides, message):
    done = train(*overrides, f"out={tmp_path / 'run'}")
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_broken_third_line_and_an_empty_file_are_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": \n')
    done = train("data=jsonl", f"data.path={tmp_path / 'bad.jsonl'}", f"out={tmp_path / 'run'}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: {tmp_path / 'bad.jsonl'}, line 3: broken JSON")
    assert "1 of 3 rows were rejected (33 %" in last
    assert not (tmp_path / "run/prepare/manifest.json").exists()
    assert json.loads((tmp_path / "run/prepare/rejects.jsonl").read_text())["where"] == "line 3"
    (tmp_path / "empty.jsonl").write_text("")
    done = train("data=jsonl", f"data.path={tmp_path / 'empty.jsonl'}", f"out={tmp_path / 'other'}")
    assert done.returncode == 1
    assert "empty.jsonl: the file is empty" in done.stderr
    assert not (tmp_path / "other").exists()
    (tmp_path / "columns.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 4)
    done = train("data=jsonl", f"data.path={tmp_path / 'columns.jsonl'}", f"out={tmp_path / 'other'}")
    assert "its columns are question, answer" in done.stderr
    assert "data.mapping={prompt: question, completion: answer}" in done.stderr
    assert not (tmp_path / "other").exists()


def test_columns_by_name_recorded_answers_packing_and_capture(tmp_path, target_folder):
    """GSM8K's layout with a mapping; trained on as recorded, packed, with features from disk."""
    path = tmp_path / "maths.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{i} + 1?", "answer": f"It is {i + 1}."}) + "\n" for i in range(14))
    )
    out = tmp_path / "run"
    arguments = command(out, target_folder, "data.mapping={prompt: question, completion: answer}", f"data.path={path}")
    look = run(*arguments, "distill.backend=recorded", "dry_run=true")
    assert look.returncode == 0, look.stderr
    assert "prompt/completion (14 of the first 14 rows)" in look.stdout
    assert "«It is 1.</s>»" in look.stdout
    assert not out.exists()
    done = run(*arguments, "distill.backend=recorded", "fit.pack_tokens=128", "capture.enabled=true")
    assert done.returncode == 0, done.stderr
    assert "not written by the target but by nobody named (14)" in done.stdout
    assert "draft vocabulary of 64 tokens covers: mine" in done.stdout
    assert json.loads((out / "capture/manifest.json").read_text())["counts"]["stored"] == 11
    assert "identical, token for token" in done.stdout


def test_medusa_heads_through_the_whole_pipeline(tmp_path, target_folder):
    out = tmp_path / "run"
    done = run(*command(out, target_folder, "drafter=medusa"))
    assert done.returncode == 0, done.stderr
    assert "identical, token for token" in done.stdout
    assert "no layout for drafters of kind medusa yet" in done.stdout
    saved = load_file(out / "fit/step-000006/drafter.safetensors")
    assert not [name for name in saved if not name.startswith(("blocks.", "outputs.", "draft_ids"))]


def test_a_target_tuned_with_its_heads_through_the_whole_pipeline(tmp_path, target_folder):
    """Medusa-2 on adapters: the report names what the output is lossless against; a second run finds it done."""
    out = tmp_path / "run"
    overrides = ("drafter=medusa", "drafter.model.heads=3", "drafter.tree.kind=chain", "target.train=lora")
    asked = command(out, target_folder, *overrides, "fit.eval_steps=2", "fit.eval_prompts=2", "joint.max_kl=5")
    done = run(*asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Lossless against the tuned target" in done.stdout
    made = json.loads((out / "fit" / "manifest.json").read_text())["counts"]
    tuned = out / "fit" / made["checkpoint"] / "target"
    assert (tuned / "model.safetensors").is_file()
    report = json.loads((out / "evaluate" / "quick" / "report.json").read_text())
    assert report["identical"]
    assert f"{made['quality']['kl_original']:.4f} nats a token" in report["facts"]["lossless against"]
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluations = [entry for entry in entries if "eval/tau" in entry]
    assert [entry["step"] for entry in evaluations] == [2, 4, 6]
    assert "eval/kl_original" in evaluations[-1]
    assert {"grad_norm", "lr", "tokens_per_second", "peak_memory_gb", "coverage", "tau"} <= set(
        next(entry for entry in entries if "grad_norm" in entry)
    )
    before = files(tuned)
    assert run(*asked).returncode == 0
    assert files(tuned) == before
    far = run(*asked, "joint.max_kl=1e-9", "joint.warmup=0.0", "stages=[fit]", "redo=[fit]")
    assert far.returncode == 1
    assert "nats a token from the original (joint.max_kl=1e-09), and no evaluation was within that" in far.stderr


def test_a_mixture_on_the_command_line(tmp_path, target_folder):
    for name in ("law", "code"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name} {i}"}}\n' for i in range(9)))
    sources = ", ".join(f"{{path: {tmp_path / name}.jsonl, weight: {w}}}" for name, w in (("law", 2), ("code", 1)))
    out = tmp_path / "run"
    done = train(
        "data=mixture",
        f"data.sources=[{sources}]",
        f"target.source={target_folder}",
        f"out={out}",
        "stages=[prepare]",
        "data.heldout=2",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "prepare/manifest.json").read_text())["counts"]["domains"] == {"code": 3, "law": 7}


def test_the_whole_pipeline_and_a_second_run(tmp_path, target_folder):
    out = tmp_path / "run"
    done = run(*command(out, target_folder))
    assert done.returncode == 0, done.stderr
    assert "identical, token for token" in done.stdout
    report = json.loads((out / "evaluate/quick/report.json").read_text())
    assert report["identical"] is True
    assert next(iter(report["domains"])) == "mine"
    assert load_file(out / "export/eagle3/model.safetensors")["lm_head.weight"].shape[0] == 64
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {line["stage"].split("/")[0] for line in lines} == {"distill", "fit", "evaluate"}
    for name in ("config.yaml", "report.md", "prepare/manifest.json", "fit/manifest.json"):
        assert (out / name).is_file()
    before = files(out)
    again = run(*command(out, target_folder))
    assert again.returncode == 0
    assert again.stdout.count("finished before, reused") == 5
    assert files(out) == before
    changed = run(*command(out, target_folder, "fit.lr=0.5"))
    assert changed.returncode == 1
    assert "fit.lr = 0.002, now 0.5" in changed.stderr
    redone = run(*command(out, target_folder, "fit.lr=0.005", "redo=[fit]"))
    assert redone.returncode == 0, redone.stderr
    assert redone.stdout.count("finished before, reused") == 2


def test_a_run_in_use_and_files_of_ones_own_are_left_alone(tmp_path, target_folder):
    out = tmp_path / "run"
    with claim(out):
        done = run(*command(out, target_folder, "stages=[prepare]"))
    assert done.returncode == 1
    assert "is in use by another process" in done.stderr
    (out / "prepare").mkdir()
    (out / "prepare/thesis.tex").touch()
    done = run(*command(out, target_folder, "stages=[prepare]"))
    assert "holds files that no run made" in done.stderr
    assert (out / "prepare/thesis.tex").is_file()


@pytest.mark.parametrize("stage", ["distill", "fit", "evaluate"])
def test_ctrl_c_and_the_same_command_again(tmp_path, target_folder, stage):
    """Interrupted as soon as a stage has begun; afterwards the result is that of a run left alone."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(out, target_folder),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    folder = out / ("evaluate/quick" if stage == "evaluate" else stage)
    deadline = time.monotonic() + 120
    while not (folder / "plan.json").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not (folder / "manifest.json").exists()
    assert run(*command(out, target_folder)).returncode == 0
    whole = tmp_path / "whole"
    assert run(*command(whole, target_folder)).returncode == 0
    for name in ("export/eagle3/model.safetensors", "fit/step-000006/drafter.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_one_drafter_per_domain_by_multirun(tmp_path, target_folder):
    done = train(
        *("-m", "data.domains=[writing],[chat]", "data.limit=4", "stages=[prepare]"),
        *(f"target.source={target_folder}", f"root={tmp_path}"),
    )
    assert done.returncode == 0, done.stderr
    made = sorted(p.parent.parent.name for p in tmp_path.glob("*/prepare/manifest.json"))
    assert made == ["smollm2-135m-eagle-chat", "smollm2-135m-eagle-writing"]
