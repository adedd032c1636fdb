from moepress.paper.tables.base import PAPER, Quality, Row

TABLE = Quality(
    name="distillation",
    title="Recovery with and without distillation",
    where="tab:kd-ablation",
    columns=("MultiRC", "COPA", "MRPC", "SQuAD"),
    ours="with",
    trains=True,
    rows=(
        Row(
            "without",
            PAPER,
            {"MultiRC": "74.77", "COPA": "64.00", "MRPC": "89.22", "SQuAD": "63.25/84.03"},
            training={"alpha": 0.0},
        ),
        Row("with", PAPER, {"MultiRC": "75.57", "COPA": "68.00", "MRPC": "90.69", "SQuAD": "65.66/85.49"}),
    ),
)
