"""One of two processes that distil one config after the other; run by test_distill.py."""

import sys

from accelerate import PartialState

from rocktokens.config import load_config
from rocktokens.training.loop import distill

if __name__ == "__main__":
    for path in sys.argv[1:]:
        distill(load_config(path), resume=True)
    PartialState().destroy_process_group()
