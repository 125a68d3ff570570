import pytest

from infcl_jax.data.decode import DECODERS, api, choose_decoder
from infcl_jax.settings import SETTINGS


@pytest.fixture(params=["gpu", "cpu"])
def machine(request, monkeypatch):
    monkeypatch.setattr(api.jax, "default_backend", lambda: request.param)
    monkeypatch.setattr(api, "gpu_decoder_installed", lambda: True)
    return request.param


def test_the_setting_has_the_decoders_as_choices():
    assert SETTINGS["decode"].values == DECODERS


@pytest.mark.parametrize("residency", ["device", "host", "replay"])
def test_auto_takes_gpus_where_they_can_decode(machine, residency):
    expected = "nvimgcodec" if (machine, residency) == ("gpu", "device") else "pillow"
    assert choose_decoder("auto", residency) == expected
    assert choose_decoder("pillow", residency) == "pillow"


@pytest.mark.parametrize("residency", ["device", "host", "replay"])
def test_gpus_that_cannot_decode_are_an_error(machine, residency):
    if (machine, residency) == ("gpu", "device"):
        assert choose_decoder("nvimgcodec", residency) == "nvimgcodec"
        return
    missing = r"GPUs \(the devices are cpu\)" if residency == "device" else "grad_cache.residency='device'"
    with pytest.raises(ValueError, match=rf"^expected {missing}.*got decode='nvimgcodec'; choose decode="):
        choose_decoder("nvimgcodec", residency)


def test_missing_packages_are_named(monkeypatch, machine):
    monkeypatch.setattr(api, "gpu_decoder_installed", lambda: False)
    assert choose_decoder("auto", "device") == "pillow"
    with pytest.raises(ValueError, match=r"^expected nvImageCodec and CuPy \(pip install 'infcl_jax\[gpu-decode\]'\)"):
        choose_decoder("nvimgcodec", "device")


def test_unknown_decoder():
    with pytest.raises(ValueError, match="decode to be one of auto, pillow, nvimgcodec, got 'turbo'"):
        choose_decoder("turbo", "device")
