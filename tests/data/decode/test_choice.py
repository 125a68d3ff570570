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


@pytest.mark.parametrize("offload", ["none", "host", "replay"])
def test_auto_takes_gpus_where_they_can_decode(machine, offload):
    expected = "nvimgcodec" if (machine, offload) == ("gpu", "none") else "pillow"
    assert choose_decoder("auto", offload) == expected
    assert choose_decoder("pillow", offload) == "pillow"


@pytest.mark.parametrize("offload", ["none", "host", "replay"])
def test_gpus_that_cannot_decode_are_an_error(machine, offload):
    if (machine, offload) == ("gpu", "none"):
        assert choose_decoder("nvimgcodec", offload) == "nvimgcodec"
        return
    missing = r"GPUs \(the devices are cpu\)" if offload == "none" else "grad_cache.offload='none'"
    with pytest.raises(ValueError, match=rf"^expected {missing}.*got decode='nvimgcodec'; choose decode="):
        choose_decoder("nvimgcodec", offload)


def test_missing_packages_are_named(monkeypatch, machine):
    monkeypatch.setattr(api, "gpu_decoder_installed", lambda: False)
    assert choose_decoder("auto", "none") == "pillow"
    with pytest.raises(ValueError, match=r"^expected nvImageCodec and CuPy \(pip install 'infcl_jax\[gpu-decode\]'\)"):
        choose_decoder("nvimgcodec", "none")


def test_unknown_decoder():
    with pytest.raises(ValueError, match="decode to be one of auto, pillow, nvimgcodec, got 'turbo'"):
        choose_decoder("turbo", "none")
