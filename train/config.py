"""From Hydra's tree to frozen dataclasses; beside the command line the only place that sees OmegaConf.

The dataclasses live beside the code that reads them; here they are put together and checked before any model loads.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.capture import CaptureConfig
from data.distill import DistillConfig
from data.prepare import DataConfig
from data.server import ServerConfig
from data.sources import SourceConfig
from eval.evaluate import EvalConfig
from specdec.drafter import drafter_module
from specdec.errors import UserError, nearest
from specdec.export.eagle3 import DTYPES
from specdec.load import TargetConfig
from specdec.search import TreeConfig
from train.adapters import LoraConfig
from train.fit_config import FitConfig
from train.joint import JointConfig
from train.log import LogConfig

CONF = Path(__file__).resolve().parents[1] / "conf"
NESTED: dict[str, tuple[str, Any]] = {
    "SourceConfig": ("data.sources", SourceConfig),
    "ServerConfig": ("distill.server", ServerConfig),
    "LoraConfig": ("lora", LoraConfig),
}
STAGES = ("prepare", "distill", "capture", "fit", "evaluate", "export")
GROUPS = ("target", "drafter", "data", "distill", "capture", "fit", "joint", "eval", "export", "log")
T = TypeVar("T")


@dataclass(frozen=True)
class ExportConfig:
    """conf/export/*.yaml."""

    engines: list[str]
    """Layouts to write: eagle3 (one folder for vLLM, SGLang and TensorRT-LLM)."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""

    def __post_init__(self) -> None:
        known = ("eagle3",)
        for engine in self.engines:
            if engine not in known:
                raise UserError(f"export.engines: '{engine}' is not one of {', '.join(known)}.{nearest(engine, known)}")
        if self.dtype not in DTYPES:
            raise UserError(f"export.dtype: '{self.dtype}' is not one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class TopConfig:
    """The keys of conf/config.yaml that belong to no group."""

    root: str = "runs"
    """Where run folders go."""
    out: str | None = None
    """This run's folder; null: ROOT/TARGET-DRAFTER-DOMAINS."""
    seed: int = 0
    """Of everything that is drawn."""
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    """Stages to run."""
    redo: list[str] = field(default_factory=list)
    """Stages to make again, with those that depend on them."""
    reuse: list[str] = field(default_factory=list)
    """Other run folders: prepare, distill and capture are taken from there where they were made in the same way."""
    dry_run: bool = False
    """Only say what the data is and what would be trained on; nothing is written."""

    def __post_init__(self) -> None:
        for name, stages in (("stages", self.stages), ("redo", self.redo)):
            for stage in stages:
                if stage not in STAGES:
                    known = ", ".join(STAGES)
                    raise UserError(f"{name}: '{stage}' is not a stage ({known}).{nearest(stage, STAGES)}")
        if not self.stages:
            raise UserError(f"stages is empty; there are {', '.join(STAGES)}")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed must be from 0 to {2**31 - 1}, got {self.seed}")
        if missing := [stage for stage in self.redo if stage not in self.stages]:
            raise UserError(f"redo: '{missing[0]}' is not among stages=[{','.join(self.stages)}]")
        for other in self.reuse:
            if not Path(other).is_dir():
                raise UserError(f"reuse: there is no run folder {other}")
        if self.out is not None and Path(self.out).exists() and not Path(self.out).is_dir():
            raise UserError(f"out: {self.out} is a file; give a folder")


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is made from."""

    out: Path
    seed: int
    stages: list[str]
    redo: list[str]
    reuse: list[str]
    dry_run: bool
    target: TargetConfig
    kind: str
    model: Any
    objective: Any
    tree: TreeConfig
    data: DataConfig
    distill: DistillConfig
    capture: CaptureConfig
    fit: FitConfig
    joint: JointConfig
    eval: EvalConfig
    export: ExportConfig
    log: LogConfig
    text: str
    """The resolved tree as YAML, for config.yaml."""


def build(cls: type[T], node: DictConfig, where: str) -> T:
    """A checked dataclass from a config node. Raises UserError naming the key for unknown keys and wrong types."""
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in map(str, node):
        if key not in known:
            name = f"{where}.{key}".lstrip(".")
            raise UserError(f"unknown config key '{name}'; known: {', '.join(known)}.{nearest(key, known)}")
    schema = OmegaConf.structured(cls)
    _open(schema)
    for key in known:
        kind = schema._get_node(key)._metadata.ref_type
        if (
            dataclasses.is_dataclass(kind)
            and schema._get_node(key)._is_none()
            and isinstance(node.get(key), DictConfig)
        ):
            schema[key] = kind  # null by default: a group of keys once one is given
    _open(schema)
    try:
        return OmegaConf.to_object(OmegaConf.merge(schema, node))  # type: ignore[return-value]
    except (OmegaConfBaseException, TypeError) as error:
        if match := re.match(r"Key '(\w+)' not in '(\w+)'", str(error)):
            place, inner = NESTED[match[2]]
            names = [field.name for field in dataclasses.fields(inner)]
            raise UserError(
                f"{place}: unknown key '{match[1]}'; known: {', '.join(names)}.{nearest(match[1], names)}"
            ) from error
        full = error.full_key if isinstance(error, OmegaConfBaseException) else ""
        key = f"{where}.{full or ''!s}".strip(".")
        raise UserError(f"{key}: {str(error).splitlines()[0]}") from error


def _open(node: Any) -> None:
    """Let values in: a frozen dataclass makes a read-only node."""
    if isinstance(node, DictConfig) and not node._is_none():
        OmegaConf.set_readonly(node, False)
        for key in node:
            _open(node._get_node(key))


def read(node: DictConfig) -> RunConfig:
    """The whole configuration. Raises UserError; loads no model."""
    OmegaConf.resolve(node)
    for group in GROUPS:
        if not isinstance(node[group], DictConfig):
            raise UserError(f"{group} is a group of keys, got '{node[group]}'; set one of them, e.g. {group}.KEY=VALUE")
    top = build(TopConfig, OmegaConf.masked_copy(node, [key for key in map(str, node) if key not in GROUPS]), "")
    target = build(TargetConfig, node.target, "target")
    kind = str(node.drafter.kind)
    named = str(node.drafter.name) if "name" in node.drafter else kind  # of several recipes of a kind
    module, objective = drafter_module(kind), objective_module(kind)
    data = build(DataConfig, node.data, "data")
    if target.train != "frozen" and kind == "draft_model":
        raise UserError(f"target.train={target.train} tunes the states a drafter reads, and a draft_model reads none")
    if target.train != "frozen" and node.fit.lora is not None:
        raise UserError(f"fit.lora puts adapters on the drafter alone; with target.train={target.train} see joint.lora")
    return RunConfig(
        out=Path(top.out or f"{top.root}/{target.name}-{named}-{_name(data.labels)}"),
        seed=top.seed,
        stages=top.stages,
        redo=top.redo,
        reuse=top.reuse,
        dry_run=top.dry_run,
        target=target,
        kind=kind,
        model=build(module.Config, node.drafter.model, "drafter.model"),
        objective=build(objective.Config, node.drafter.objective, "drafter.objective"),
        tree=build(TreeConfig, node.drafter.tree, "drafter.tree"),
        data=data,
        distill=build(DistillConfig, node.distill, "distill"),
        capture=build(CaptureConfig, node.capture, "capture"),
        fit=build(FitConfig, node.fit, "fit"),
        joint=build(JointConfig, node.joint, "joint"),
        eval=build(EvalConfig, node.eval, "eval"),
        export=build(ExportConfig, node.export, "export"),
        log=build(LogConfig, node.log, "log"),
        text=OmegaConf.to_yaml(node),
    )


def _name(labels: list[str]) -> str:
    """Labels as part of a folder's name."""
    return re.sub(r"[^\w-]+", "_", "-".join(labels))[:60]


def objective_module(kind: str) -> Any:
    """train/objectives/<kind>.py. Raises UserError for a drafter that is not trained."""
    if not (Path(__file__).parent / "objectives" / f"{kind}.py").is_file():
        raise UserError(f"drafter kind '{kind}' has nothing to train (no train/objectives/{kind}.py)")
    return importlib.import_module(f"train.objectives.{kind}")


def explain(error: Exception, keys: list[str]) -> str:
    """One line for what Hydra says about a command line, with the nearest key there is."""
    text = " ".join(str(error).split())
    if text.startswith("Could not override '"):
        key = text.split("'")[1]
        return f"unknown config key '{key}'.{nearest(key, keys)}"
    if "mismatched input" in text or "no viable alternative" in text or "token recognition" in text:
        text += """. Quote values with other letters twice, e.g. 'data.path="a=b.jsonl"'"""
    return text.replace("Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", "").strip()


def flat_keys(node: Any, prefix: str = "") -> list[str]:
    """Every key of a tree as a dotted name."""
    if not isinstance(node, dict):
        return [prefix.rstrip(".")]
    return [
        prefix.rstrip("."),
        *(k for key, value in node.items() for k in flat_keys(value, f"{prefix}{key}.")),
    ]


def known_keys() -> list[str]:
    """Every key of the default configuration."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return flat_keys(OmegaConf.to_container(compose("config"), resolve=False))
