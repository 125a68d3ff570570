"""Print the table of settings as Markdown."""

from infcl_jax.settings.text import format_markdown

print(format_markdown(), end="")
