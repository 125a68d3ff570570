import collections
import dataclasses
import itertools
import re

import numpy as np
import pytest
from PIL import Image

from infcl_jax.data import ByteTokenizer, shapes

COLORS, SHAPES = (
    tuple(dict.fromkeys(part)) for part in zip(*(name.split() for name in shapes.CLASS_NAMES), strict=True)
)
BACKGROUNDS = ("white", "gray", "black", "brown", "navy")
SIZES = ("small", "large")
PLACES = ("center", "left", "right", "top", "bottom", "top left", "top right", "bottom left", "bottom right")
RELATIONS = ("left of", "right of", "above", "below")
REVERSED = {"to its left": "left of", "to its right": "right of", "above it": "above", "below it": "below"}


def invert(attributes):
    return {phrase: attribute for attribute in attributes for phrase in shapes.phrases(attribute)}


def find_all(attributes, text):
    """The attributes whose phrases occur in a text, in order; longer phrases win."""
    table = invert(attributes)
    pattern = "|".join(sorted(map(re.escape, table), key=len, reverse=True))
    return [table[match] for match in re.findall(rf"\b(?:{pattern})\b", text)]


def meaning(caption):
    """What a reader learns from a caption: the discrete attributes of its scene."""
    objects = list(zip(find_all(COLORS, caption), find_all(SHAPES, caption), strict=True))
    (background,) = find_all(BACKGROUNDS, caption)
    if len(objects) == 1:
        (size,), (place,) = find_all(SIZES, caption), find_all(PLACES, caption)
        return objects, background, size, place
    if " with " in caption:
        relation = next(relation for phrase, relation in REVERSED.items() if phrase in caption)
        return objects[::-1], background, relation
    (relation,) = find_all(RELATIONS, caption)
    return objects, background, relation


def truth(scene):
    objects = [(thing.color, thing.shape) for thing in scene.things]
    if scene.relation is None:
        return objects, scene.background, scene.size, scene.place
    return objects, scene.background, scene.relation


def silhouette(scene, image_size=32):
    """How far each pixel is from the empty background, and the background itself."""
    empty = shapes.draw(dataclasses.replace(scene, things=()), image_size).astype(np.float32)
    return np.abs(shapes.draw(scene, image_size) - empty).sum(axis=2)


def nearest(features, labels, queries):
    distance = ((queries[:, None] - features[None]) ** 2).sum(axis=2)
    return labels[distance.argmin(axis=1)]


def test_caption_says_the_discrete_attributes():
    for split, index in itertools.product(("train", "zero_shot"), range(1500)):
        caption = shapes.render(split, index, 8).caption
        assert meaning(caption) == truth(shapes.sample_scene(split, index)), caption


def test_longest_caption_fits_a_byte_tokenizer():
    def longest(attributes):
        return max((phrase for attribute in attributes for phrase in shapes.phrases(attribute)), key=len)

    color, shape, background = longest(COLORS), longest(SHAPES), longest(BACKGROUNDS)
    thing = f"an {color} {shape}"
    words = {"a": "a", "size": longest(SIZES), "color": color, "shape": shape, "place": longest(PLACES)}
    words |= {"first": thing, "second": thing, "relation": longest(RELATIONS), "reversed": max(REVERSED, key=len)}
    captions = [form.format(background=background, **words) for form in shapes.ONE_FORMS + shapes.TWO_FORMS]
    captions += [template.format(name) for template in shapes.TEMPLATES for name in shapes.CLASS_NAMES]
    assert max(map(len, captions)) <= shapes.MAX_CAPTION_BYTES <= ByteTokenizer().context_length - 2
    assert all(caption.isascii() for caption in captions)


def test_forms_and_synonyms_are_all_used():
    text = " ".join(shapes.render("train", index, 8).caption for index in range(4000))
    attributes = COLORS + SHAPES + BACKGROUNDS + SIZES + PLACES + RELATIONS
    missing = [phrase for attribute in attributes for phrase in shapes.phrases(attribute) if phrase not in text]
    assert not missing
    assert all(phrase in text for phrase in REVERSED)


@pytest.mark.parametrize("name", ["orange circle", "red star"])
def test_templates_are_sentences_of_the_grammar(name):
    color, shape = name.split()
    read = [meaning(template.format(name)) for template in shapes.TEMPLATES]
    assert all(objects == [(color, shape)] for objects, *_ in read)
    assert {background for _, background, *_ in read} == set(BACKGROUNDS)


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


def test_captions_identify_their_scene_in_a_gallery():
    gallery = collections.Counter(str(truth(shapes.sample_scene("validation", index))) for index in range(500))
    assert len(gallery) / 500 > 0.97  # the expected R@1 of a model that reads captions perfectly and guesses in ties


def test_objects_are_apart_inside_and_where_the_relation_says():
    for index in range(2000):
        scene = shapes.sample_scene("train", index)
        for thing in scene.things:
            assert all(c - thing.radius > -0.02 and c + thing.radius < 1.02 for c in thing.center)
        if scene.relation:
            (x0, y0), (x1, y1) = (thing.center for thing in scene.things)
            side = {"left of": x1 - x0, "right of": x0 - x1, "above": y1 - y0, "below": y0 - y1}[scene.relation]
            across = abs(y1 - y0) if scene.relation in ("left of", "right of") else abs(x1 - x0)
            assert side >= sum(thing.radius for thing in scene.things) - 1e-6 and side > across


def test_every_object_is_visible():
    for index in range(500):
        scene = shapes.sample_scene("train", index)
        for thing in scene.things:
            assert (silhouette(dataclasses.replace(scene, things=(thing,))) > 60).sum() >= 10, scene


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


def test_labels():
    zero_shot = collections.Counter(shapes.render("zero_shot", index, 8).label for index in range(144))
    assert zero_shot == dict.fromkeys(range(len(shapes.CLASS_NAMES)), 2)
    pairs = 0
    for index in range(400):
        scene, label = shapes.sample_scene("train", index), shapes.render("train", index, 8).label
        assert label == (-1 if scene.relation else shapes.CLASS_NAMES.index(scene.things[0].name))
        pairs += label == -1
    assert 140 < pairs < 260


def test_unknown_split():
    with pytest.raises(ValueError, match="train, validation, zero_shot, got 'test'"):
        shapes.render("test", 0, 32)
