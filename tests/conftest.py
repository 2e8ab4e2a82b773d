"""Fixtures that every test may use, and the device that all tests take."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# The suite does the same on a machine with an accelerator as on one without; DeepSpeed reads this
# when it is first asked for its accelerator, and the processes that tests start inherit it. A test
# marked `gpu` takes it out of the environment of the processes that it starts.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# A shell without job control starts its background jobs deaf to Ctrl-C, and so would be everything
# that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no limit on the time of one, which a busy machine would break.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text and vocabularies beside the checkout; skips where it is absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the folder of test data, shared/data beside the checkout, is not there")
    return folder
