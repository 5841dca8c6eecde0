"""Rewrites a GGUF file with all weights in f32 or bf16, for peers that would otherwise compute with quantized weights.

    python bench/dequantise.py MODEL.gguf OUT.gguf [--type f32|bf16]

Norms stay in f32, as converters leave them. All other content of the file (vocabulary, chat template, sizes) is
copied.
"""

import argparse

import gguf
import numpy as np

FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "bf16": gguf.LlamaFileType.MOSTLY_BF16}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("out")
    p.add_argument("--type", choices=FILE_TYPES, default="f32")
    arguments = p.parse_args()
    reader = gguf.GGUFReader(arguments.model)
    architecture = reader.get_field(gguf.Keys.General.ARCHITECTURE).contents()
    writer = gguf.GGUFWriter(arguments.out, architecture)
    written_anyway = {gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE}
    for field in reader.fields.values():
        if field.name in written_anyway or field.name.startswith("GGUF."):
            continue
        kind, inner = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    writer.add_file_type(FILE_TYPES[arguments.type])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if arguments.type == "bf16" and values.ndim > 1:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
