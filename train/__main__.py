"""python -m train: Hydra's command line around the pipeline. Mistakes end in one line and exit code 1."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any


def main() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand us the exception instead of printing it over several lines
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages for weights and caches, where Linux has them
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")  # its products of 1024 shapes take gigabytes, and every batch has another
    warnings.filterwarnings("ignore", category=FutureWarning)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell starts us with them ignored
        signal.signal(number, _interrupt)
    try:
        _main()
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from here", file=sys.stderr)
        sys.exit(130)


interrupted: list[int] = []


def _interrupt(number: int, _: Any) -> None:
    interrupted.append(number)
    raise KeyboardInterrupt


def _main() -> None:
    # Imported here, where an interrupt is caught: torch and transformers take seconds.
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException
    from safetensors import SafetensorError

    from specdec.errors import UserError
    from train.config import CONF, explain, known_keys, read
    from train.pipeline import run_pipeline

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def run(node: DictConfig) -> None:
        try:
            run_pipeline(read(node))
        except Exception as error:
            if interrupted:  # compiled code may turn an interrupt into an error of its own
                raise KeyboardInterrupt from error
            if isinstance(error, UserError):  # said here and not outside: Hydra would print its own lines around it
                _fail(str(error))
            if isinstance(error, OSError | SafetensorError):
                _fail(f"{error} (the same command goes on from what is finished)")
            raise

    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        _fail(explain(error, known_keys()))


def _fail(message: str) -> Any:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
