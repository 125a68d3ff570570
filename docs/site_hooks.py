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
_NO_ADDRESS = "repository:"  # of files in a repository without a public address
_LINK = re.compile(r"^```.*?^```|`[^`\n]+`|(?<=\]\()(?![a-z]+:|#)([^)#\s]+)", re.MULTILINE | re.DOTALL)  # or code


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root."""
    for name, page in _PAGES.items():
        files.append(File.generated(config, page, content=(_ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files that are not on the site to the repository, if the site has its address.

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
        if target in files.src_uris and not target.endswith(".py") and not target.startswith("examples/"):
            return posixpath.relpath(target, posixpath.dirname(uri) or ".")
        if not (_ROOT / path).exists():
            raise PluginError(f"{source}: expected a link to a file of the repository, got {match[1]!r}")
        if not config.repo_url:
            return f"{_NO_ADDRESS}/{path}"
        return f"{config.repo_url.rstrip('/')}/{'tree' if (_ROOT / path).is_dir() else 'blob'}/main/{path}"

    return _LINK.sub(resolved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave the text of links that have no address."""
    return re.sub(rf'<a href="{_NO_ADDRESS}/[^"]*">(.*?)</a>', r"\1", html, flags=re.DOTALL)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Change the page of missing addresses like other pages."""
    return _without_requests(output_content)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Change what mkdocs-material has no setting for."""
    return _without_requests(output)


def _without_requests(html: str) -> str:
    """Leave out the request for the repository's stars, so that pages load nothing from other hosts."""
    return html.replace(' data-md-component="source"', "")
