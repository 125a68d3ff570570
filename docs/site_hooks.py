"""Hooks of mkdocs for links to the repository and for its root's pages."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # in the root: on the site
# A fenced block of code, in which `encoders[name](rows)` is no link, or the path of a link.
_CODE_OR_LINK = re.compile(r"^```.*?^```|(?<=\]\()(?![a-z]+:|#)([^)#\s]+)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root."""
    for name, page in _PAGES.items():
        files.append(File.generated(config, page, content=(_ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files that are not on the site to the repository.

    Raises:
      PluginError: A link leads to no file of the repository.
    """
    uri = page.file.src_uri
    source = {page: name for name, page in _PAGES.items()}.get(uri, f"docs/{uri}")

    def resolved(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        target = _PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target in files.src_uris and not target.endswith(".py"):
            return posixpath.relpath(target, posixpath.dirname(uri) or ".")
        if not (_ROOT / path).exists():
            raise PluginError(f"{source}: expected a link to a file of the repository, got {match[1]!r}")
        return f"{config.repo_url}/{'tree' if (_ROOT / path).is_dir() else 'blob'}/main/{path}"

    return _CODE_OR_LINK.sub(resolved, markdown)
