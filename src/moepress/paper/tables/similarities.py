from moepress.paper.tables.base import PAPER, Quality, Row

COLUMNS = ("MultiRC", "COPA", "MRPC", "SQuAD")
PRINTED = {
    "random": "74.69 62.00 89.95 64.97/84.96",
    "expert-weight": "75.29 63.00 89.46 64.98/85.18",
    "expert-weight-feature": "74.96 62.00 89.95 64.98/85.19",
    "expert-gradient": "75.50 59.00 89.22 64.93/85.01",
    "expert-feature": "74.74 60.00 89.95 65.03/85.21",
    "expert-feature.abs": "75.20 65.00 89.22 64.90/85.15",
    "router-weight": "75.01 59.00 88.73 64.99/85.02",
    "router-logits": "75.57 68.00 90.69 65.66/85.49",
}

TABLE = Quality(
    name="similarities",
    title="Which experts are alike",
    where="tab:grouping-method",
    columns=COLUMNS,
    ours="router-logits",
    rows=tuple(
        Row(
            name,
            PAPER | ({"plan.similarity": name} if name != "router-logits" else {}),
            dict(zip(COLUMNS, printed.split(), strict=True)),
        )
        for name, printed in PRINTED.items()
    ),
)
