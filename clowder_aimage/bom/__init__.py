"""Bills of materials: what is in an AImage, in the forms of CycloneDX and SPDX."""
