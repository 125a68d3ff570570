"""Write infcl_jax/evaluation/classes/*.json: class names and prompt templates of public data sets.

    pip install clip_benchmark open_clip_torch timm
    git clone https://github.com/openai/CLIP && git clone https://github.com/mlfoundations/wise-ft
    python tests/golden/make_class_data.py CLIP wise-ft

Written with clip_benchmark 1.6.2, open_clip_torch 3.3.0, timm 1.0.31, CLIP d05afc4 and wise-ft 58b7a4b. Names and
templates of clip_benchmark come first: its class order is that of torchvision, VTAB and its own webdatasets. OpenAI's
`data/prompts.md` completes them.
"""

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

OUTPUT = Path(__file__).parents[2] / "infcl_jax" / "evaluation" / "classes"
CLIP_BENCHMARK = "clip_benchmark 1.6.2 (MIT)"
OPENAI = "OpenAI CLIP, data/prompts.md (MIT)"
VTAB = "TFDS labels of VTAB (Apache-2.0)"
# Section of prompts.md by name in clip_benchmark.
SECTIONS = {
    "birdsnap": "Birdsnap",
    "cars": "StanfordCars",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "dtd": "DescribableTextures",
    "fgvc_aircraft": "FGVCAircraft",
    "food101": "Food101",
    "hateful_memes": "HatefulMemes",
    "kinetics700": "Kinetics700",
    "renderedsst2": "SST2",
    "resisc45": "RESISC45",
    "stl10": "STL10",
    "sun397": "SUN397",
    "ucf101": "UCF101",
}
# Labels without names: VTAB uses the label itself, and clip_benchmark has templates for it.
NUMBERED = {
    "dsprites_label_orientation": 40,
    "dsprites_label_x_position": 32,
    "smallnorb_label_azimuth": 18,
    "smallnorb_label_elevation": 9,
}


def show(directory: Path, path: str) -> str:
    """Return a file of the checked-out commit of a clone."""
    return subprocess.check_output(["git", "-C", str(directory), "show", f"HEAD:{path}"], text=True)


def read_prompts(markdown: str) -> dict[str, dict[str, list[str]]]:
    """Return the lists `classes` and `templates` of every section of prompts.md."""
    sections = {}
    for section in re.split(r"^## ", markdown, flags=re.MULTILINE)[1:]:
        lists = re.findall(r"^(classes|templates) = (\[.*?^\])", section, flags=re.MULTILINE | re.DOTALL)
        sections[section.splitlines()[0]] = {name: ast.literal_eval(text) for name, text in lists}
    return sections


def write(name: str, source: str, **fields: object) -> None:
    """Write one data set, one entry a line."""
    lines = [f'"source": {json.dumps(source)}']
    for field, value in fields.items():
        entries = [json.dumps(entry, ensure_ascii=False) for entry in value] if isinstance(value, list) else None
        text = json.dumps(value) if entries is None else "[\n  " + ",\n  ".join(entries) + "\n ]"
        lines.append(f'"{field}": {text}')
    OUTPUT.joinpath(f"{name}.json").write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing the package."""
    return Path(find_spec(name).submodule_search_locations[0])


def read_wnids(variant: str) -> list[str]:
    """Return the WordNet ids of ImageNet or a variant of it, from timm."""
    return (package_folder("timm") / "data" / "_info" / f"{variant}_synsets.txt").read_text().split()


def read_literal(path: Path, name: str) -> list[str]:
    """Return the list assigned to `name` in a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def write_imagenet(wise_ft: Path, imagenet_o: list[str]) -> None:
    """Write ImageNet-1k and the data sets that share its classes."""
    wnids = read_wnids("imagenet")
    templates = [template("{}") for template in OPENAI_IMAGENET_TEMPLATES]
    write(
        "imagenet1k",
        "OpenAI CLIP, notebooks/Prompt_Engineering_for_ImageNet.ipynb (MIT), as in open_clip_torch 3.3.0; "
        "folders are WordNet ids, from timm 1.0.31 (Apache-2.0)",
        classes=IMAGENET_CLASSNAMES,
        templates=templates,
        folders=wnids,
    )
    write("imagenet_sketch", "ImageNet-1k's classes", base="imagenet1k")
    folders = [str(i) for i in range(1000)]
    write("imagenetv2", "ImageNet-1k's classes; folders are its labels", base="imagenet1k", folders=folders)
    subsets = {"imagenet_o": (imagenet_o, CLIP_BENCHMARK)}
    for name in ("imagenet_a", "imagenet_r"):
        subsets[name] = (read_wnids(name), "timm 1.0.31 (Apache-2.0)")
    for name, (subset, source) in subsets.items():
        write(name, f"{source}: WordNet ids", base="imagenet1k", imagenet=sorted([wnids.index(w)] for w in subset))

    metadata = "src/datasets/objectnet_metadata"
    label_of_folder = json.loads(show(wise_ft, f"{metadata}/folder_to_objectnet_label.json"))
    mapping = json.loads(show(wise_ft, f"{metadata}/objectnet_to_imagenet_1k.json"))
    ids = json.loads(show(wise_ft, f"{metadata}/pytorch_to_imagenet_2012_id.json"))
    original = {int(i): int(label) for label, i in ids.items()}
    labels = show(wise_ft, f"{metadata}/imagenet_to_label_2012_v2").splitlines()
    index = {label.strip(): original[i] for i, label in enumerate(labels)}
    folders = sorted(folder for folder, label in label_of_folder.items() if label in mapping)
    write(
        "objectnet",
        "ObjectNet's class mapping (Barbu et al. 2019), from mlfoundations/wise-ft (MIT)",
        base="imagenet1k",
        classes=[label_of_folder[folder].lower() for folder in folders],
        folders=folders,
        imagenet=[[index[name] for name in mapping[label_of_folder[folder]].split("; ")] for folder in folders],
    )


def main() -> None:
    """Write all files."""
    clip, wise_ft = map(Path, sys.argv[1:])
    package = package_folder("clip_benchmark") / "datasets"
    classes = json.loads((package / "en_classnames.json").read_text())
    templates = json.loads((package / "en_zeroshot_classification_templates.json").read_text())
    templates = {name: [t.replace("{c}", "{}") for t in lines] for name, lines in templates.items()}
    templates |= {"caltech101_vtab": templates["caltech101"]}
    prompts = read_prompts(show(clip, "data/prompts.md"))
    # Labels follow the class paths, and "/" sorts before "_": jail/indoor, jail_cell.
    sun = prompts["SUN397"]["classes"]
    i = sun.index("jail cell")
    sun[i], sun[i + 1] = sun[i + 1], sun[i]

    OUTPUT.mkdir(exist_ok=True)
    write_imagenet(wise_ft, read_literal(package / "builder.py", "imagenet_o_wnids"))
    for name in classes.keys() - {"imagenet1k"}:
        write(name, CLIP_BENCHMARK, classes=classes[name], templates=templates[name])
    for name, section in SECTIONS.items():
        own = prompts[section]
        source = f"classes: {OPENAI}; templates: {CLIP_BENCHMARK}" if name in templates else OPENAI
        write(name, source, classes=own["classes"], templates=templates.get(name, own["templates"]))
    categories = read_literal(package / "voc2007.py", "object_categories")
    write("voc2007", CLIP_BENCHMARK, classes=categories, templates=templates["voc2007"])
    for name, count in NUMBERED.items():
        source = f"classes: {VTAB}; templates: {CLIP_BENCHMARK}"
        write(name, source, classes=[str(i) for i in range(count)], templates=templates[name])


if __name__ == "__main__":
    main()
