from moepress.paper.tables.base import FULL, PAPER, Quality, Row

COLUMNS = ("Size", "TFLOPs", "COPA", "MRPC", "SQuAD")
PRINTED = {
    "full": "2.0B 4.65 68.00 90.20 65.39/85.81",
    "m-smoe": "733M 4.65 68.00 90.69 65.66/85.49",
    "c-smoe": "570M 3.83 64.00 88.97 64.78/84.93",
    "mc-smoe": "381M 3.83 67.00 89.22 65.41/85.30",
}
FIGURES = {name: dict(zip(COLUMNS, printed.split(), strict=True)) for name, printed in PRINTED.items()}

TABLE = Quality(
    name="merge-or-compress",
    title="Merging, decomposing, and both",
    where="tab:merging-and-decomposition",
    columns=COLUMNS,
    ours="mc-smoe",
    rows=(
        Row(FULL.name, paper=FIGURES["full"]),
        Row("m-smoe", PAPER, FIGURES["m-smoe"]),
        Row("c-smoe", {"method": "c-smoe", "preset": "paper"}, FIGURES["c-smoe"], schedule="cubic"),
        Row("mc-smoe", PAPER | {"method": "mc-smoe"}, FIGURES["mc-smoe"], schedule="cubic"),
    ),
)
