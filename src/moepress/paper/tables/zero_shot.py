from moepress.paper.tables.base import DENSE, FULL, PAPER, Quality, Row

COLUMNS = ("Size", "TFLOPs", "MRPC", "OpenBookQA", "WinoGrande")
PRINTED = {
    "dense": "125M 5.08 37.75 34.00 49.49",
    "full": "15B 5.08 60.54 36.80 51.78",
    "pruning": "552M 5.08 52.20 30.60 48.46",
    "task-specific": "552M 5.08 40.19 23.60 48.38",
    "m-smoe": "552M 5.08 52.69 34.40 50.43",
    "mc-smoe": "166M 4.45 47.55 34.60 49.09",
}
FIGURES = {name: dict(zip(COLUMNS, printed.split(), strict=True)) for name, printed in PRINTED.items()}

TABLE = Quality(
    name="zero-shot",
    title="Without any training, every layer merged",
    where="tab:gpt-512-complete",
    columns=COLUMNS,
    ours="m-smoe",
    keep=16 / 512,
    rows=(
        Row(DENSE.name, paper=FIGURES["dense"], dense=True),
        Row(FULL.name, paper=FIGURES["full"]),
        Row("pruning", {"method": "frequency-pruning", "preset": "paper"}, FIGURES["pruning"]),
        Row("task-specific", {"method": "task-specific"}, FIGURES["task-specific"]),
        Row("m-smoe", PAPER | {"plan.skip": "none"}, FIGURES["m-smoe"]),
        Row("mc-smoe", PAPER | {"method": "mc-smoe", "plan.skip": "none"}, FIGURES["mc-smoe"]),
    ),
    printed_on="fairseq-moe-15b, 16 of 512 experts",
)
