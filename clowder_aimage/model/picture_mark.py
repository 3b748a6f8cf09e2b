"""The mark of a picture file: XMP which says that a machine made the picture.

The properties are IPTC's DigitalSourceType (IPTC Photo Metadata Standard, "Digital Source Type")
and XMP's CreatorTool, the software. There is no time in it, so that the same request gives the same
file. docs/marks.md describes where the formats have it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import unescape

from clowder_aimage import __version__

# The vocabulary of IPTC: made by a model alone, and with parts that were not
_VOCABULARY = "http://cv.iptc.org/newscodes/digitalsourcetype/"
GENERATED = f"{_VOCABULARY}trainedAlgorithmicMedia"
COMPOSITE = f"{_VOCABULARY}compositeWithTrainedAlgorithmicMedia"
AGENT_NAME = "aimage"
AGENT = f"{AGENT_NAME} {__version__}"
# Keywords before XMP in a PNG file (XMP Specification, Part 3, 1.1.5)
XMP_KEYWORD = "XML:com.adobe.xmp"
_PACKET = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" '
    'xmlns:xmp="http://ns.adobe.com/xap/1.0/" '
    'Iptc4xmpExt:DigitalSourceType="{source_type}" xmp:CreatorTool="{agent}"/>'
    '</rdf:RDF></x:xmpmeta><?xpacket end="r"?>'
)
# Characters of a value
_MAX_VALUE = 300


@dataclass(frozen=True, slots=True)
class PictureMark:
    """The statements of a mark: IPTC's source type, and the software; empty if it has none."""

    source_type: str
    agent: str = AGENT

    @property
    def is_generated(self) -> bool:
        """Return True if a model made all of the picture."""
        return self.source_type == GENERATED

    @property
    def short_type(self) -> str:
        """Return the source type without its vocabulary."""
        return self.source_type.removeprefix(_VOCABULARY)

    def encode(self) -> str:
        """Return the XMP packet of a mark with the source type of this module."""
        return _PACKET.format(source_type=self.source_type, agent=self.agent)


def parse_mark(xmp: bytes) -> PictureMark | None:
    """Return the mark in XMP of any program; None if it has no source type."""
    source_type = _find_value(xmp, rb"DigitalSourceType")
    # The vocabulary is written with both schemes
    source_type = re.sub("^https:", "http:", source_type)
    return PictureMark(source_type, _find_value(xmp, rb"CreatorTool")) if source_type else None


def _find_value(xmp: bytes, name: bytes) -> str:
    """Return a property, an attribute or an element of any prefix; empty without it."""
    start = rb"\s*=\s*[\"']|>\s*|\s+rdf:resource\s*=\s*[\"']"
    found = re.search(rb"[\w-]:" + name + rb"(?:" + start + rb")([^\"'<>]*)", xmp)
    return unescape(found[1].decode("utf-8", "replace"))[:_MAX_VALUE].strip() if found else ""
