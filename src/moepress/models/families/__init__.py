"""The adapters, most specific first. A family with the fused layout needs no entry."""

from moepress.models.adapter import Adapter
from moepress.models.families.aria import AriaAdapter
from moepress.models.families.dbrx import DbrxAdapter
from moepress.models.families.deepseek_v4 import HashAdapter
from moepress.models.families.doge import DogeAdapter
from moepress.models.families.ernie_vl import ErnieVLAdapter
from moepress.models.families.inkling import InklingAdapter
from moepress.models.families.jetmoe import JetMoeAdapter
from moepress.models.families.llama4 import Llama4Adapter
from moepress.models.families.longcat import LongcatAdapter
from moepress.models.families.nllb import NllbAdapter
from moepress.models.families.step3p7 import Step3p7Adapter
from moepress.models.families.switch import SwitchAdapter
from moepress.models.families.zaya import ZayaAdapter
from moepress.models.fused import FusedAdapter

ADAPTERS: list[Adapter] = [
    DogeAdapter(),
    SwitchAdapter(),
    NllbAdapter(),
    JetMoeAdapter(),
    AriaAdapter(),
    DbrxAdapter(),
    Llama4Adapter(),
    LongcatAdapter(),
    Step3p7Adapter(),
    ZayaAdapter(),
    InklingAdapter(),
    HashAdapter(),
    ErnieVLAdapter(),
    FusedAdapter(),
]
