"""The job script of docs/examples and the manifest of docs/clusters.md: syntax, exit statuses and settings."""

import re
import subprocess

import pytest
import runs
import yaml

from infcl_jax.runtime.exit_codes import RESUME
from infcl_jax.settings import SETTINGS

DOCS = runs.ROOT / "docs"
TEXT = (DOCS / "clusters.md").read_text()
SCRIPT = (DOCS / "examples" / "slurm.sh").read_text()


def block(language):
    (code,) = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return code


def test_the_job_script_is_bash_that_requeues():
    for script in (SCRIPT, block("sh")):
        assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assert f"    {RESUME} | 137 | 143)" in SCRIPT


def test_the_manifest_replaces_pods_that_ask_for_it():
    service, job = yaml.safe_load_all(block("yaml"))
    ignore, fail = job["spec"]["podFailurePolicy"]["rules"][1:]
    assert ignore["action"] == "Ignore" and RESUME in ignore["onExitCodes"]["values"]
    assert fail["action"] == "FailJob" and fail["onExitCodes"]["values"] == ignore["onExitCodes"]["values"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environ["NUM_PROCESSES"] == str(job["spec"]["completions"])
    assert environ["COORDINATOR_ADDRESS"].startswith(f"{job['metadata']['name']}-0.{service['metadata']['name']}:")


@pytest.mark.parametrize("text", [SCRIPT, block("yaml")], ids=["script", "manifest"])
def test_the_settings_exist(text):
    assert set(re.findall(r"--config\.([\w.]+)=", text)) <= set(SETTINGS)
