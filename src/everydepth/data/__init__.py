"""Data: surfaces, digits, label noise, local files, the Hugging Face Hub, batches.

>>> ed.data.load_digits("test")
Images(359 rows: pixel_values 1x8x8 float32, labels int64)
"""

from everydepth.data.augment import crop_and_flip
from everydepth.data.batches import Batches, batches, token_blocks, tokenized, trim_padding
from everydepth.data.catalog import data_names, load
from everydepth.data.digits import load_digits
from everydepth.data.hub import load_hub
from everydepth.data.images import load_images
from everydepth.data.noise import NoisyLabels, flip_labels
from everydepth.data.sets import Batch, Corpus, Data, Images, Points, Rows, Table, Texts, Tokens
from everydepth.data.surfaces import SURFACES, Surface, surface_data
from everydepth.data.tables import load_columns, load_table, load_text

__all__ = [
    "SURFACES",
    "Batch",
    "Batches",
    "Corpus",
    "Data",
    "Images",
    "NoisyLabels",
    "Points",
    "Rows",
    "Surface",
    "Table",
    "Texts",
    "Tokens",
    "batches",
    "crop_and_flip",
    "data_names",
    "flip_labels",
    "load",
    "load_columns",
    "load_digits",
    "load_hub",
    "load_images",
    "load_table",
    "load_text",
    "surface_data",
    "token_blocks",
    "tokenized",
    "trim_padding",
]
