import gpus
import pytest


@pytest.fixture
def interpreter(capsys):
    """Run Hopper kernels in Pallas' interpreter, on two SMs, and fail on races."""
    with gpus.interpreted(capsys):
        yield
