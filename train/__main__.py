"""python -m train: Hydra's command line around the pipeline. Mistakes end in one line and exit code 1."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.errors import UserError
from train.config import CONF, explain, flat_keys, read


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def run(node: DictConfig) -> None:
    try:
        config = read(node)
        from train.pipeline import run_pipeline  # the heavy part, after the configuration is known to be right

        run_pipeline(config)
    except UserError as error:  # here and not in main(): Hydra would print its own lines around it
        _fail(str(error))


def main() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand us the exception instead of printing it over several lines
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        _fail(explain(error, _known_keys()))
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def _known_keys() -> list[str]:
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return flat_keys(OmegaConf.to_container(compose("config"), resolve=False))


if __name__ == "__main__":
    main()
