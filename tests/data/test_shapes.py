import dataclasses
import hashlib
import itertools
import re

import numpy as np
import pytest
from PIL import Image

from infcl_jax.data import ByteTokenizer, shapes
from infcl_jax.models import model_config

COLORS, SHAPES = (
    tuple(dict.fromkeys(part)) for part in zip(*(name.split() for name in shapes.CLASS_NAMES), strict=True)
)
BACKGROUNDS = ("white", "gray", "black", "brown", "navy")
SIZES = ("small", "large")
PLACES = {"center": (0.5, 0.5), "left": (0.3, 0.5), "right": (0.7, 0.5), "top": (0.5, 0.3), "bottom": (0.5, 0.7)}
RELATIONS = ("left of", "right of", "above", "below")
REVERSED = {"to its left": "left of", "to its right": "right of", "above it": "above", "below it": "below"}


def invert(attributes):
    return {phrase: attribute for attribute in attributes for phrase in shapes.phrases(attribute)}


def find_all(attributes, text):
    """The attributes whose phrases occur in a text, in order; longer phrases win."""
    table = invert(attributes)
    pattern = "|".join(sorted(map(re.escape, table), key=len, reverse=True))
    return [table[match] for match in re.findall(rf"\b(?:{pattern})\b", text)]


def at_most_one(attributes, text):
    found = find_all(attributes, text)
    assert len(found) <= 1, text
    return found[0] if found else None


def meaning(caption):
    """Objects and other discrete attributes that a caption mentions."""
    objects = list(zip(find_all(COLORS, caption), find_all(SHAPES, caption), strict=True))
    reversed_relations = [relation for phrase, relation in REVERSED.items() if phrase in caption]
    if reversed_relations:
        objects.reverse()
        (relation,) = reversed_relations
    else:
        relation = at_most_one(RELATIONS, caption)
    said = {"background": at_most_one(BACKGROUNDS, caption), "relation": relation}
    said |= {"size": at_most_one(SIZES, caption), "position": at_most_one(PLACES, caption)}
    return {"objects": objects} | {key: value for key, value in said.items() if value is not None}


def truth(scene):
    """All discrete attributes of a scene, as `meaning` names them."""
    attributes = {key: getattr(scene, key) for key in ("background", "relation", "size", "position")}
    objects = [(thing.color, thing.shape) for thing in scene.objects]
    return {"objects": objects} | {key: value for key, value in attributes.items() if value is not None}


def sentences(color, shape):
    """Every caption that the grammar has for one object."""
    words = {"color": (color,), "shape": (shape,), "size": SIZES, "position": PLACES, "background": BACKGROUNDS}
    words = {slot: [phrase for name in names for phrase in shapes.phrases(name)] for slot, names in words.items()}
    forms = (*shapes.ONE_FORMS, shapes.BRIEF_FORMS[0])
    choices = [dict(zip(words, choice, strict=True)) for choice in itertools.product(*words.values())]
    return {form.format(**choice) for form in forms for choice in choices}


def alone(scene, thing, image_size=32):
    return silhouette(dataclasses.replace(scene, objects=(thing,)), image_size)


def silhouette(scene, image_size=32):
    """How far each pixel is from the empty background, summed over the channels."""
    empty = shapes.draw(dataclasses.replace(scene, objects=()), image_size).astype(np.float32)
    return np.abs(shapes.draw(scene, image_size) - empty).sum(axis=2)


def nearest(features, labels, queries):
    distance = ((queries[:, None] - features[None]) ** 2).sum(axis=2)
    return labels[distance.argmin(axis=1)]


@pytest.mark.parametrize("split", shapes.SPLITS)
def test_what_a_caption_says_is_true_of_its_scene(split):
    for index in range(1500):
        caption, facts = shapes.render(split, index, 8).caption, truth(shapes.sample_scene(split, index))
        said = meaning(caption)
        assert said.items() <= facts.items() and "objects" in said, caption


def test_captions_labels_and_scenes_never_change():
    digest = hashlib.sha256()
    for split, index in itertools.product(shapes.SPLITS, range(1000)):
        _, caption, label = shapes.render(split, index, 1)
        digest.update(repr((caption, label, shapes.sample_scene(split, index))).encode())
    assert digest.hexdigest()[:16] == "359c59257c7985d7"


def test_longest_caption_fits_the_byte_tokenizer_of_the_quickstart():
    def longest(attribute):
        return max(shapes.phrases(attribute), key=len)

    things = {name: "a " + " ".join(map(longest, name.split())) for name in shapes.CLASS_NAMES}
    backgrounds = max(map(longest, BACKGROUNDS), key=len)
    rest = {"relation": max(map(longest, RELATIONS), key=len), "reversed": max(REVERSED, key=len)}
    pairs = [
        form.format(first=things[first], second=things[second], background=backgrounds, **rest)
        for form in (*shapes.TWO_FORMS, shapes.BRIEF_FORMS[1])
        for first, second in itertools.permutations(shapes.CLASS_NAMES, 2)
    ]
    captions = {caption for name in shapes.CLASS_NAMES for caption in sentences(*name.split())}.union(pairs)
    assert shapes.MAX_CAPTION_BYTES - 2 <= max(map(len, captions)) <= shapes.MAX_CAPTION_BYTES
    assert all(caption.isascii() for caption in captions)
    tokenizer = ByteTokenizer(model_config("tiny-shapes").text.context_length)
    text = "x" * shapes.MAX_CAPTION_BYTES
    assert tokenizer.decode(tokenizer(text)[0]) == text


@pytest.mark.parametrize("name", ["purple circle", "red star"])
def test_templates_are_sentences_of_the_grammar(name):
    prompts = {template.format(name) for template in shapes.TEMPLATES}
    assert len(prompts) == len(shapes.TEMPLATES) and prompts <= sentences(*name.split())
    read = [meaning(prompt) for prompt in prompts]
    assert {said.get("size") for said in read} == {None, *SIZES}
    assert {said.get("position") for said in read} == {None, *PLACES}


def test_samples_depend_on_split_and_index_alone():
    keys = list(itertools.product(shapes.SPLITS, range(50)))
    first = {key: shapes.render(*key, 32) for key in keys}
    again = {key: shapes.render(*key, 32) for key in reversed(keys)}
    for key in keys:
        assert (first[key].image == again[key].image).all() and first[key][1:] == again[key][1:]
    assert len({sample.image.tobytes() for sample in first.values()}) == len(keys)


def test_image_size_does_not_change_the_scene():
    for index in range(20):
        small, large = shapes.render("train", index, 32), shapes.render("train", index, 128)
        assert small[1:] == large[1:]
        shrunk = np.asarray(Image.fromarray(large.image).resize((32, 32), Image.Resampling.BOX), np.float32)
        assert np.abs(shrunk - small.image).mean() < 2.0


def test_place_and_size_can_be_seen():
    side = 64
    for index in range(400):
        scene = shapes.sample_scene("zero_shot", index)
        mask = silhouette(scene, side)
        rows, columns = (np.flatnonzero(mask.max(axis=axis) > 0.5 * mask.max()) for axis in (1, 0))
        middle = np.array([columns[0] + columns[-1] + 1, rows[0] + rows[-1] + 1]) / (2 * side)
        assert min(PLACES, key=lambda place: np.linalg.norm(middle - PLACES[place])) == scene.position, index
        extent = (1 + max(np.ptp(rows), np.ptp(columns))) / side
        assert (extent > 0.43) == (scene.size == "large"), index


def test_objects_are_inside_apart_and_where_the_relation_says():
    for index in range(1000):
        scene = shapes.sample_scene("train", index)
        for thing in scene.objects:  # a large one may lose less than two of 32 pixels at the edge
            assert all(c - thing.radius > -0.06 and c + thing.radius < 1.06 for c in thing.center)
            assert (alone(scene, thing) > 60).sum() >= 10, scene
        if scene.relation:
            (x0, y0), (x1, y1) = (thing.center for thing in scene.objects)
            side = {"left of": x1 - x0, "right of": x0 - x1, "above": y1 - y0, "below": y0 - y1}[scene.relation]
            across = abs(y1 - y0) if scene.relation in ("left of", "right of") else abs(x1 - x0)
            assert side > 1.5 * across
            first, second = (alone(scene, thing, 64) > 10 for thing in scene.objects)
            assert (first & second).sum() <= 0.02 * min(first.sum(), second.sum())  # they may touch


def test_shapes_and_colors_can_be_told_apart_at_32_pixels():
    def features(indices):
        crops, colors = [], []
        for index in indices:
            scene, image = shapes.sample_scene("zero_shot", index), shapes.render("zero_shot", index, 32).image
            mask = silhouette(scene)
            rows, columns = (np.flatnonzero(mask.max(axis=axis) > 0.3 * mask.max()) for axis in (1, 0))
            crop = Image.fromarray(mask / mask.max()).crop((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
            crops.append(np.asarray(crop.resize((12, 12), Image.Resampling.BILINEAR)).ravel())
            colors.append(image[mask > 0.9 * mask.max()].mean(axis=0))
        return np.array(crops), np.array(colors)

    known, asked = range(1440), range(1440, 1728)
    (crops, colors), (crop_queries, color_queries) = features(known), features(asked)
    names = np.array([shapes.CLASS_NAMES[index % len(shapes.CLASS_NAMES)].split() for index in (*known, *asked)])
    for column, reference, queries in ((1, crops, crop_queries), (0, colors, color_queries)):
        found = nearest(reference, names[: len(known), column], queries)
        assert (found == names[len(known) :, column]).mean() > 0.97
    means = np.array([colors[names[: len(known), 0] == color].mean(axis=0) for color in COLORS])
    gaps = np.linalg.norm(means[:, None] - means[None], axis=2)
    assert gaps[~np.eye(len(COLORS), dtype=bool)].min() > 75  # also to the eye: of 442 from black to white


def test_unknown_split():
    with pytest.raises(ValueError, match="train, validation, zero_shot, got 'test'"):
        shapes.render("test", 0, 32)
