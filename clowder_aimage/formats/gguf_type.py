"""Types of GGUF: of metadata values, of tensors, and what a whole file is said to be made of.

Sources: ggml-org/ggml, docs/gguf.md, "File Structure" and "General metadata"; sizes of blocks and
the types that are newer than that text: ggml-org/llama.cpp, gguf-py/gguf/constants.py
(GGMLQuantizationType, GGML_QUANT_SIZES, LlamaFileType) and ggml/include/ggml.h (enum ggml_type).
"""

from __future__ import annotations

import struct

# enum gguf_metadata_value_type
SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in zip((*range(8), 10, 11, 12), "BbHhIifBQqd", strict=True)
}
UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9

# enum ggml_type: name, elements and bytes of a block
TENSORS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
REMOVED = frozenset({4, 5, 31, 32, 33, 36, 37, 38})  # no reader takes them any more

# enum llama_ftype, general.file_type: what most tensors are, without ALL_ and MOSTLY_
_OLD = "F32 F16 Q4_0 Q4_1 Q4_1_SOME_F16 Q4_2 Q4_3 Q8_0 Q5_0 Q5_1"
_K = "Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K"
_IQ = (
    "IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M "
    "BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8"
)
_NEW = "TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0"
FILES = dict(enumerate(f"{_OLD} {_K} {_IQ} {_NEW}".split()))
GUESSED = 1024  # a flag: whoever wrote it was not told; alone it says nothing
