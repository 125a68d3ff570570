"""Fields of dataclasses as settings."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from infcl_jax.schema import Range, Section, setting, settings_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blur(Section, prefix="image.blur.", evaluated=True):
    """Branch with settings, a plain field and a rule between fields."""

    radius: int = setting(1, "radius in pixels", Range(0))
    share: float | None = setting(None, "share of the images", Range(0, 1))
    kernel: tuple[float, ...] = setting((), "weights")
    path: str = setting("", "file", before="old")
    table: object = None

    def check(self):
        """Refuse a share without a radius."""
        if self.share and not self.radius:
            raise ValueError("expected image.blur.radius with image.blur.share")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree(Section):
    """Root with a branch of another default."""

    seed: int = setting(0, "seed", fixed=True)
    blur: Blur = Blur(radius=3)


def test_values_take_the_type_of_their_field():
    blur = Blur(radius=12.0, share=np.float32(0.5), kernel=[np.int64(1), 0.5], path=Path("a/b"), table=[1])
    assert blur == Blur(radius=12, share=0.5, kernel=(1, 0.5), path="a/b", table=[1])
    assert [type(value) for value in (blur.radius, blur.share, *blur.kernel)] == [int, float, int, float]
    assert type(Blur(share=1).share) is float


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"radius": True}, "image.blur.radius to be an integer, got True"),
        ({"share": 0.5, "radius": 0}, "image.blur.radius with image.blur.share"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    for create in (Blur, lambda **fields: dataclasses.replace(Blur(), **fields)):
        with pytest.raises(ValueError, match=f"^expected {message}$"):
            create(**fields)


def test_a_tree_lists_its_settings_with_its_values_as_defaults():
    settings = settings_of(Tree(seed=5))
    assert {name: setting.default for name, setting in settings.items()} == {
        "seed": 5,
        "image.blur.radius": 3,
        "image.blur.share": None,
        "image.blur.kernel": (),
        "image.blur.path": "",
    }
    assert [name for name, setting in settings.items() if setting.evaluated] == list(settings)[1:]
    assert [name for name, setting in settings.items() if setting.fixed] == ["seed"]
    assert [name for name, setting in settings.items() if setting.resolved_once] == ["image.blur.path"]


def test_a_tree_as_a_dictionary_has_its_settings_alone():
    tree = Tree(blur=Blur(table={}))
    assert tree.to_dict() == {"seed": 0, "blur": {"radius": 1, "share": None, "kernel": (), "path": ""}}
    assert tree["seed"] == 0 and tree["blur.radius"] == 1
