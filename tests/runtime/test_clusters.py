"""The job script and the manifest of docs/examples: syntax, exit statuses and settings."""

import re
import subprocess

import pytest
import runs
import yaml

from infcl_jax.runtime.exit_codes import RESUME
from infcl_jax.settings import SETTINGS

EXAMPLES = runs.ROOT / "docs" / "examples"
SCRIPT, MANIFEST = ((EXAMPLES / name).read_text() for name in ("slurm.sh", "kubernetes.yaml"))


def test_the_job_script_is_bash_that_requeues():
    assert subprocess.run(["bash", "-n"], input=SCRIPT, text=True, capture_output=True).stderr == ""
    assert f"    {RESUME} | 137 | 143)" in SCRIPT


def test_the_manifest_replaces_pods_that_ask_for_it():
    service, job = yaml.safe_load_all(MANIFEST)
    ignore, fail = job["spec"]["podFailurePolicy"]["rules"][1:]
    assert ignore["action"] == "Ignore" and RESUME in ignore["onExitCodes"]["values"]
    assert fail["action"] == "FailJob" and fail["onExitCodes"]["values"] == ignore["onExitCodes"]["values"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environ["NUM_PROCESSES"] == str(job["spec"]["completions"])
    assert environ["COORDINATOR_ADDRESS"].startswith(f"{job['metadata']['name']}-0.{service['metadata']['name']}:")


@pytest.mark.parametrize("text", [SCRIPT, MANIFEST], ids=["script", "manifest"])
def test_the_settings_exist(text):
    assert set(re.findall(r"--config\.([\w.]+)=", text)) <= set(SETTINGS)
