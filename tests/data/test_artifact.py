import json

import pytest

from data.artifact import claim, fingerprint, forget, open_stage, stale, write_by
from specdec import UserError

CONFIG = {"fit": {"lr": 0.1, "steps": 3}}


def test_a_stage_is_finished_only_with_its_manifest(tmp_path):
    stage = open_stage(tmp_path / "fit", "fit", CONFIG, {"distill": "a"})
    assert not stage.finished
    again = open_stage(tmp_path / "fit", "fit", CONFIG, {"distill": "a"})
    assert not again.finished
    again.finish({"steps": 3})
    done = open_stage(tmp_path / "fit", "fit", CONFIG, {"distill": "a"})
    assert done.finished
    assert done.counts == {"steps": 3}
    manifest = json.loads((tmp_path / "fit/manifest.json").read_text())
    assert manifest["fingerprint"] == fingerprint(stage.plan)
    assert "torch" in manifest["versions"]


@pytest.mark.parametrize("finished", [False, True])
def test_other_settings_stop_and_name_the_key(tmp_path, finished):
    stage = open_stage(tmp_path / "fit", "fit", CONFIG, {"distill": "a"})
    (tmp_path / "fit/step-1").touch()
    if finished:
        stage.finish({})
    with pytest.raises(UserError, match=r"fit\.lr = 0\.1, now 0\.2.*redo=\[fit\]"):
        open_stage(tmp_path / "fit", "fit", {"fit": {"lr": 0.2, "steps": 3}}, {"distill": "b"})
    with pytest.raises(UserError, match="another distill than there is now"):
        open_stage(tmp_path / "fit", "fit", CONFIG, {"distill": "b"})


def test_forget_starts_anew(tmp_path):
    open_stage(tmp_path / "fit", "fit", CONFIG, {}).finish({})
    forget(tmp_path / "fit")
    assert not open_stage(tmp_path / "fit", "fit", {"other": 1}, {}).finished


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")

    def broken(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_by(path, broken)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_plan_with_nothing_made_yet_gives_way(tmp_path):
    open_stage(tmp_path / "fit", "fit", {"lr": 1}, {})
    assert not open_stage(tmp_path / "fit", "fit", {"lr": 2}, {}).finished


def test_files_that_no_run_made_are_neither_adopted_nor_removed(tmp_path):
    (tmp_path / "fit").mkdir()
    (tmp_path / "fit/thesis.tex").touch()
    with pytest.raises(UserError, match="holds files that no run made"):
        open_stage(tmp_path / "fit", "fit", CONFIG, {})
    assert (tmp_path / "fit/thesis.tex").is_file()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/.plan.json.partial").touch()  # killed while it was written
    open_stage(tmp_path / "empty", "fit", CONFIG, {})


def test_a_damaged_plan_is_named(tmp_path):
    open_stage(tmp_path / "fit", "fit", CONFIG, {})
    (tmp_path / "fit/plan.json").write_text('{"config": ')
    with pytest.raises(UserError, match=r"plan\.json is damaged"):
        open_stage(tmp_path / "fit", "fit", CONFIG, {})


def test_stale_is_finished_or_of_other_settings(tmp_path):
    folder = tmp_path / "fit"
    assert not stale(folder, CONFIG, {})
    stage = open_stage(folder, "fit", CONFIG, {})
    assert not stale(folder, CONFIG, {})
    assert stale(folder, {"other": 1}, {})
    stage.finish({})
    assert stale(folder, CONFIG, {})


def test_a_new_empty_setting_is_named_and_what_holds_no_pieces_begins_anew(tmp_path):
    open_stage(tmp_path / "a", "prepare", {"x": 1}, {})
    (tmp_path / "a/rejects.jsonl").touch()
    for new in ({"x": 1, "y": None}, {"x": 1, "y": {}}):
        with pytest.raises(UserError, match="y = nothing, now"):
            open_stage(tmp_path / "a", "prepare", new, {})
    stage = open_stage(tmp_path / "a", "prepare", {"x": 2}, {}, pieces=False)
    assert stage.plan["config"] == {"x": 2}
    stage.finish({})
    with pytest.raises(UserError, match="x = 2, now 3"):
        open_stage(tmp_path / "a", "prepare", {"x": 3}, {}, pieces=False)


def test_one_process_at_a_time_in_a_run_folder(tmp_path):
    held = claim(tmp_path / "run")
    with pytest.raises(UserError, match="is in use by another process"):
        claim(tmp_path / "run")
    held.close()
    claim(tmp_path / "run").close()
