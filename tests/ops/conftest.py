import gpus
import pytest


@pytest.fixture
def interpreter(capsys):
    """Run Hopper kernels in Pallas' interpreter, and fail on races."""
    with gpus.interpreted(capsys, gpus.ALONE):
        yield
