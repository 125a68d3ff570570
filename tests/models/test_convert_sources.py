"""Files of pretrained models on the Hub, in its cache and without a connection, and OpenCLIP's tags."""

import hashlib
import http.server
import importlib.util
import json
import re
import threading

import pytest
from golden import make_open_clip_tags

from infcl_jax.models import model_names
from infcl_jax.models.convert.api import read_config
from infcl_jax.models.convert.sources import hub_repository, open_source, pretrained_tags

COMMIT = "0" * 40
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CLIP = {
    "config.json": {"model_type": "clip", "vision_config": TOWER, "text_config": TOWER},
    "model.safetensors": {},
    "preprocessor_config.json": HALF,
}
OPEN_CLIP = {
    "open_clip_config.json": {"embed_dim": 8, "vision_cfg": {}, "text_cfg": {}},
    "open_clip_model.safetensors": {},
}


class Mirror(http.server.BaseHTTPRequestHandler):
    """Hub with the repository owner/name: files at /OWNER/NAME/resolve/REVISION/FILE."""

    files: dict

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        match = re.fullmatch(r"/owner/name/resolve/(main|v2)/(.+)", self.path)
        found = match is not None and match[2] in self.files
        content = json.dumps(self.files[match[2]]).encode() if found else b""
        gated, revision = self.path.startswith("/owner/gated/"), self.path.startswith("/owner/name/")
        self.send_response(200 if found else 403 if gated else 404)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        if not found:
            missing = "GatedRepo" if gated else "RevisionNotFound" if revision else "RepoNotFound"
            self.send_header("X-Error-Code", "EntryNotFound" if match else missing)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def constants(tmp_path, monkeypatch):
    """Constants of `huggingface_hub`, with an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return constants


@pytest.fixture
def hub(constants, monkeypatch):
    """Starts a mirror with the files of owner/name."""
    servers = []

    def start(files):
        handler = type("Handler", (Mirror,), {"files": files})
        server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://localhost:{server.server_port}"
        template = re.sub(r"^https?://[^/]+", endpoint, constants.HUGGINGFACE_CO_URL_TEMPLATE)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def offline(constants, monkeypatch, tmp_path):
    """Writes the cache of owner/name, and switches the connection off."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def cached(files, absent=()):
        repository = tmp_path / "cache" / "models--owner--name"
        snapshot, no_exist = repository / "snapshots" / COMMIT, repository / ".no_exist" / COMMIT
        for folder in (snapshot, no_exist, repository / "refs"):
            folder.mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        for name, content in files.items():
            (snapshot / name).write_text(json.dumps(content))
        for name in absent:
            (no_exist / name).touch()

    return cached


def mean(source):
    return read_config(source).image_mean[0]


@pytest.mark.parametrize("name", ["owner/name", "owner/name@v2"])
@pytest.mark.parametrize(
    ("files", "format", "expected"),
    [
        (CLIP, "hf", 0.5),
        ({**CLIP, "preprocessor_config.json": {}}, "hf", 0.48145466),
        ({name: CLIP[name] for name in ("config.json", "model.safetensors")}, "hf", 0.48145466),
        (CLIP | OPEN_CLIP, "open_clip", 0.48145466),
    ],
)
def test_the_files_of_a_repository_are_found(hub, name, files, format, expected):
    hub(files)
    source = open_source(f"hf-hub:{name}")
    assert (source.format, mean(source)) == (format, expected)
    assert source.find("missing.json", "config.json") == source.find("config.json")
    assert source.find("missing.json") is None


@pytest.mark.parametrize("nested", [{"image_processor": HALF, "processor_class": "CLIPProcessor"}, HALF])
def test_the_processor_of_transformers_5_has_the_preprocessing(hub, nested):
    files = {name: CLIP[name] for name in ("config.json", "model.safetensors")}
    hub(files | {"processor_config.json": nested})
    assert mean(open_source("hf-hub:owner/name")) == 0.5


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf-hub:owner/other", r"the Hub repository hf-hub:owner/other, got none: .*; check its name, and log in with"),
        (
            "hf-hub:owner/gated",
            r"access to the gated Hub repository hf-hub:owner/gated, got none: .*; accept its terms",
        ),
        ("hf-hub:owner/name@v3", r"the revision of hf-hub:owner/name@v3 on the Hub, got none: .*; give a branch"),
    ],
)
def test_a_repository_that_is_refused_is_an_error_that_says_why(hub, path, message):
    hub(CLIP)
    with pytest.raises(FileNotFoundError, match=rf"^expected {message}[^\n]*$"):
        open_source(path)


@pytest.mark.parametrize(
    ("files", "absent", "missing"),
    [
        ({}, (), "open_clip_config.json or config.json"),
        ({"config.json": CLIP["config.json"]}, (), "model.safetensors or .* or pytorch_model.bin"),
        ({name: CLIP[name] for name in ("config.json", "model.safetensors")}, (), "preprocessor_config.json or"),
        (
            {name: CLIP[name] for name in ("config.json", "model.safetensors")},
            ("preprocessor_config.json",),
            "preprocessor_config.json or processor_config.json",
        ),
    ],
)
def test_a_file_that_cannot_be_fetched_is_an_error(offline, tmp_path, files, absent, missing):
    offline(files, absent)
    message = rf"^expected {missing}.* of hf-hub:owner/name in the cache {tmp_path}/cache, got none, and HF_HUB_OFFLINE"
    with pytest.raises(FileNotFoundError, match=message):
        open_source("hf-hub:owner/name")


@pytest.mark.parametrize(
    ("files", "absent", "expected"),
    [
        (CLIP, (), 0.5),
        (
            {name: CLIP[name] for name in ("config.json", "model.safetensors")},
            ("preprocessor_config.json", "processor_config.json"),
            0.48145466,
        ),
        (OPEN_CLIP, (), 0.48145466),
    ],
)
def test_cached_files_are_read_offline(offline, files, absent, expected):
    offline(files, absent)
    assert mean(open_source("hf-hub:owner/name")) == expected


def test_a_bert_alone_needs_no_preprocessing(offline):
    offline({"config.json": {"model_type": "bert"}, "model.safetensors": {}})
    assert open_source("hf-hub:owner/name").preprocessor == {}


def test_a_lost_connection_is_named(constants, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def unreachable(*arguments, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("an error happened")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(FileNotFoundError, match=r"in the cache .*, got none, and there is no connection to http"):
        open_source("hf-hub:owner/name")


@pytest.mark.parametrize(
    ("spec", "repository"),
    [
        ("ViT-B-32:laion2b_s34b_b79k", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"),
        ("ViT-B-32/laion2b_s34b_b79k", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"),
        ("ViT-B/16:OpenAI", "timm/vit_base_patch16_clip_224.openai"),
        ("ViT-B-16-SigLIP:webli", "timm/ViT-B-16-SigLIP"),
        ("ViT-B/32", None),
        ("runs/photos", None),
        ("clip:vocabulary", None),
        ("hf-hub:owner/name", None),
    ],
)
def test_a_tag_of_openclip_names_its_repository(spec, repository):
    assert hub_repository(spec) == repository


def test_a_folder_is_no_tag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ViT-B-32" / "openai").mkdir(parents=True)
    assert hub_repository("ViT-B-32/openai") is None


def test_an_unknown_tag_is_an_error_with_the_tags_of_the_model():
    message = r"^expected a tag of ViT-L-14-336 \(openai\), got 'opnai'; did you mean ViT-L-14-336:openai\?$"
    with pytest.raises(ValueError, match=message):
        open_source("ViT-L-14-336:opnai")


def test_every_tagged_model_is_known():
    assert set(pretrained_tags()) <= set(model_names())
    repositories = [name for tags in pretrained_tags().values() for name in tags.values()]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in repositories)


@pytest.mark.skipif(importlib.util.find_spec("open_clip") is None, reason="needs open_clip_torch")
def test_tags_are_those_of_the_installed_openclip():
    assert make_open_clip_tags.registry() == pretrained_tags()
