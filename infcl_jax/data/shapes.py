"""Procedural images of colored shapes, with captions from a small grammar.

A sample is a pure function of `(split, index)`, so the dataset needs no download and any sample can be drawn at any
image size. Scenes have one or two objects. Captions name some of their discrete attributes and none of their continuous
jitter. Half of the training captions are brief: they name only the color and shape of each object.

Lengths are fractions of the image side, with x to the right and y down. Colors are RGB in [0, 255].
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_RGB = tuple[float, float, float]

SPLITS = ("train", "validation", "zero_shot")
MAX_CAPTION_BYTES = 58  # bytes of the longest caption; a byte tokenizer with context 60 truncates none

_COLORS: dict[str, _RGB] = {
    "red": (220, 35, 40),
    "yellow": (240, 222, 50),
    "green": (45, 160, 60),
    "cyan": (55, 210, 225),
    "blue": (45, 80, 225),
    "purple": (130, 40, 190),
}
_BACKGROUNDS: dict[str, _RGB] = {
    "white": (240, 240, 240),
    "gray": (128, 128, 128),
    "black": (18, 18, 18),
    "brown": (105, 65, 35),
    "navy": (18, 22, 85),
}
_POSITIONS: dict[str, tuple[float, float]] = {
    "center": (0.5, 0.5),
    "left": (0.3, 0.5),
    "right": (0.7, 0.5),
    "top": (0.5, 0.3),
    "bottom": (0.5, 0.7),
}
_RADII = {"small": (0.18, 0.21), "large": (0.28, 0.32)}
_PAIR_RADII = (0.19, 0.22)
_RELATIONS: dict[str, tuple[float, float]] = {
    "left of": (-1.0, 0.0),
    "right of": (1.0, 0.0),
    "above": (0.0, -1.0),
    "below": (0.0, 1.0),
}

# Synonyms of each attribute; an attribute without an entry has its own name alone.
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "red": ("red", "crimson"),
    "yellow": ("yellow", "golden"),
    "cyan": ("cyan", "turquoise"),
    "purple": ("purple", "violet"),
    "gray": ("gray", "grey"),
    "small": ("small", "tiny", "little"),
    "large": ("large", "big", "huge"),
    "circle": ("circle", "disc"),
    "square": ("square", "box"),
    "cross": ("cross", "plus"),
    "ring": ("ring", "hoop"),
    "center": ("in the center", "in the middle"),
    "left": ("on the left", "at the left"),
    "right": ("on the right", "at the right"),
    "top": ("at the top",),
    "bottom": ("at the bottom",),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
# The position of the first object relative to the second: "{second} with {first} above it".
_REVERSED = {"left of": "to its left", "right of": "to its right", "above": "above it", "below": "below it"}

ONE_FORMS = (
    "a {size} {color} {shape} {position}",
    "{position}, a {size} {color} {shape}",
    "{size} {color} {shape} {position} on {background}",
)
TWO_FORMS = (
    "{first} {relation} {second}",
    "{second} with {first} {reversed}",
    "{first} {relation} {second} on {background}",
)
# Forms for one and for two objects that name only color and shape.
BRIEF_FORMS = ("a {color} {shape}", "{first} and {second}")


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compute the approximate signed distance to a five-pointed star.

    Symmetry folds the plane to half a point, whose edge is a line from the tip to the notch.
    """
    sector = 2 * math.pi / 5
    angle = np.abs((np.arctan2(x, y) + sector / 2) % sector - sector / 2)
    radius = np.hypot(x, y)
    notch_x, notch_y = 0.44 * math.cos(sector / 2), 0.44 * math.sin(sector / 2)
    normal_x, normal_y = notch_y, 1.0 - notch_x
    length = math.hypot(normal_x, normal_y)
    return ((radius * np.cos(angle) - 1.0) * normal_x + radius * np.sin(angle) * normal_y) / length


def _cross(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = np.abs(x), np.abs(y)
    return np.minimum(np.maximum(x - 0.28, y - 0.95), np.maximum(x - 0.95, y - 0.28))


# Approximate signed distances to shapes of about unit radius: negative inside, in units of the radius, y up.
_DISTANCES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": lambda x, y: np.hypot(x, y) - 0.9,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.8,
    "triangle": lambda x, y: np.maximum(-y - 0.7, 0.866 * np.abs(x) + 0.5 * (y + 0.2) - 0.5),
    "star": _star,
    "cross": _cross,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.7) - 0.2,
}

CLASS_NAMES: tuple[str, ...] = tuple(f"{color} {shape}" for color in _COLORS for shape in _DISTANCES)
TEMPLATES: tuple[str, ...] = (
    "a {}",
    "a small {} in the center",
    "a large {} in the middle",
    "a tiny {} at the top",
    "a big {} at the bottom",
    "on the left, a little {}",
    "on the right, a huge {}",
    "small {} at the left on white",
    "large {} at the right on black",
    "tiny {} at the top on gray",
    "big {} at the bottom on navy",
)


@dataclasses.dataclass(frozen=True)
class SceneObject:
    """Object of a scene: named attributes and geometry."""

    shape: str
    color: str
    center: tuple[float, float]
    radius: float
    angle: float  # counterclockwise, in radians
    rgb: _RGB  # jittered

    @property
    def name(self) -> str:
        """The class name, such as "red circle"."""
        return f"{self.color} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Scene:
    """Background with one object, which has a size and a position, or two, which have a relation."""

    objects: tuple[SceneObject, ...]
    background: str
    background_rgb: _RGB  # jittered, at the image center
    slope: tuple[float, float]  # relative change of the background's brightness per image side, along x and y
    size: str | None = None
    position: str | None = None
    relation: str | None = None  # from the first to the second object


class Sample(NamedTuple):
    """Image with a caption and a class.

    The caption names the color and shape of every object. Unless brief, it also names the size and position of a single
    object or the relation of two objects, and in some forms the background.
    """

    image: np.ndarray  # uint8 [S, S, 3]
    caption: str  # at most `MAX_CAPTION_BYTES` ASCII bytes
    label: int  # index into `CLASS_NAMES`, -1 for scenes with two objects


class _Draws:
    """Random numbers of one sample, from a Philox stream keyed by (split, index)."""

    def __init__(self, split: str, index: int):
        if split not in SPLITS:
            raise ValueError(f"expected a split among {', '.join(SPLITS)}, got {split!r}")
        key = np.array([SPLITS.index(split), index], dtype=np.uint64)
        # One call for all draws: a scalar draw costs as much as the whole vector.
        self._uniform = iter(np.random.Generator(np.random.Philox(key=key)).random(64).tolist())

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * next(self._uniform)

    def choice[T](self, options: Sequence[T]) -> T:
        return options[int(next(self._uniform) * len(options))]

    def shade(self, rgb: _RGB) -> _RGB:
        """Jitter the brightness and hue of a color."""
        light = self.uniform(0.9, 1.1)
        red, green, blue = (min(max(value * light + self.uniform(-6, 6), 0.0), 255.0) for value in rgb)
        return red, green, blue

    def scene_object(
        self, name: str, center: tuple[float, float], jitter: tuple[float, float], radii: tuple[float, float]
    ) -> SceneObject:
        color, shape = name.split(" ")
        x, y = (c + self.uniform(-j, j) for c, j in zip(center, jitter, strict=True))
        angle = self.uniform(-0.2, 0.2)
        return SceneObject(shape, color, (x, y), self.uniform(*radii), angle, self.shade(_COLORS[color]))


def _scene(split: str, index: int, draws: _Draws) -> Scene:
    """Draw a scene; `backdrop` holds the color and the slope of its background."""
    background = draws.choice(tuple(_BACKGROUNDS))
    backdrop = (draws.shade(_BACKGROUNDS[background]), (draws.uniform(-0.15, 0.15), draws.uniform(-0.15, 0.15)))
    if split == "zero_shot":
        name = CLASS_NAMES[index % len(CLASS_NAMES)]  # balanced classes
    else:
        name = draws.choice(CLASS_NAMES)
        if draws.choice((False, True)):
            return _pair(name, background, backdrop, draws)
    size, position = draws.choice(tuple(_RADII)), draws.choice(tuple(_POSITIONS))
    only = draws.scene_object(name, _POSITIONS[position], (0.035, 0.035), _RADII[size])
    return Scene((only,), background, *backdrop, size=size, position=position)


def _pair(name: str, background: str, backdrop: tuple[_RGB, tuple[float, float]], draws: _Draws) -> Scene:
    other = CLASS_NAMES[(CLASS_NAMES.index(name) + draws.choice(range(1, len(CLASS_NAMES)))) % len(CLASS_NAMES)]
    relation = draws.choice(tuple(_RELATIONS))
    dx, dy = _RELATIONS[relation]
    # Along the relation, jitter is small enough that the objects at most touch.
    jitter = (0.04, 0.10) if dx else (0.10, 0.04)
    first = draws.scene_object(name, (0.5 + 0.23 * dx, 0.5 + 0.23 * dy), jitter, _PAIR_RADII)
    second = draws.scene_object(other, (0.5 - 0.23 * dx, 0.5 - 0.23 * dy), jitter, _PAIR_RADII)
    return Scene((first, second), background, *backdrop, relation=relation)


def sample_scene(split: str, index: int) -> Scene:
    """Compute the scene of a sample without its image."""
    return _scene(split, index, _Draws(split, index))


def phrases(attribute: str) -> tuple[str, ...]:
    """Return the synonyms of an attribute such as "cyan", "top" or "above"."""
    return _SYNONYMS.get(attribute, (attribute,))


def _describe(item: SceneObject, draws: _Draws) -> str:
    color, shape = draws.choice(phrases(item.color)), draws.choice(phrases(item.shape))
    return f"a {color} {shape}"


def _caption(scene: Scene, draws: _Draws, *, brief: bool) -> str:
    background = draws.choice(phrases(scene.background))
    if scene.relation is not None:
        first, second = (_describe(item, draws) for item in scene.objects)
        relation = draws.choice(phrases(scene.relation))
        form = BRIEF_FORMS[1] if brief else draws.choice(TWO_FORMS)
        return form.format(
            first=first, second=second, relation=relation, reversed=_REVERSED[scene.relation], background=background
        )
    assert scene.size is not None and scene.position is not None
    (only,) = scene.objects
    keys = {"size": scene.size, "color": only.color, "shape": only.shape, "position": scene.position}
    words = {slot: draws.choice(phrases(key)) for slot, key in keys.items()}
    form = BRIEF_FORMS[0] if brief else draws.choice(ONE_FORMS)
    return form.format(background=background, **words)


@functools.cache
def _grid(image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the coordinates of the pixel centers: x [1, S] and y [S, 1]."""
    centers = (np.arange(image_size, dtype=np.float32) + np.float32(0.5)) / np.float32(image_size)
    return centers[None, :], centers[:, None]


def draw(scene: Scene, image_size: int) -> np.ndarray:
    """Render an anti-aliased image of a scene, uint8 [S, S, 3]."""
    x, y = _grid(image_size)
    light = 1.0 + scene.slope[0] * (x - 0.5) + scene.slope[1] * (y - 0.5)
    canvas = light[..., None] * np.array(scene.background_rgb, np.float32)
    for item in scene.objects:
        right, up = (x - item.center[0]) / item.radius, (item.center[1] - y) / item.radius
        cos, sin = math.cos(item.angle), math.sin(item.angle)
        distance = _DISTANCES[item.shape](cos * right + sin * up, cos * up - sin * right)
        coverage = np.clip(0.5 - distance * (item.radius * image_size), 0.0, 1.0)[..., None]
        canvas += coverage * (np.array(item.rgb, np.float32) - canvas)
    return np.clip(canvas + 0.5, 0.0, 255.0).astype(np.uint8)


def render(split: str, index: int, image_size: int) -> Sample:
    """Render one sample.

    Equal arguments give equal samples, in any order and in any process.

    Args:
      split: "train" and "validation" mix scenes of one and two objects. "zero_shot" has one object per scene and
        balanced classes. Only "train" has brief captions (`BRIEF_FORMS`), for a random half of its samples. The splits
        share no random stream.
      index: non-negative.
      image_size: side S in pixels; the scene does not depend on it.

    Raises:
      ValueError: the split is unknown.
    """
    draws = _Draws(split, index)
    scene = _scene(split, index, draws)
    label = CLASS_NAMES.index(scene.objects[0].name) if len(scene.objects) == 1 else -1
    brief = split == "train" and draws.choice((False, True))
    return Sample(draw(scene, image_size), _caption(scene, draws, brief=brief), label)
