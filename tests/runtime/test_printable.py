import sys
import unicodedata

from infcl_jax.runtime.printable import printable


def test_only_printable_characters_and_marks_of_scripts_remain():
    # Cf has the overrides of the direction and the joiners of emoji and Indic scripts, which move no cursor.
    joiners = {0xAD, 0x200B, 0x200C, 0x200D}
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        escaped = printable(character)
        category = unicodedata.category(character)
        if category in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(character) in (
            *("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"),
        ):
            assert escaped.isascii() and escaped.isprintable() and escaped != character, hex(code)
        elif code in joiners or character.isprintable():
            assert escaped == character, hex(code)
