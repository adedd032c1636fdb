import sys, types, copy, os, tempfile, traceback, warnings, time
warnings.filterwarnings("ignore")
class _P(types.ModuleType):
    def fixture(self,*a,**k): return (lambda f: f)
p=_P("pytest"); p.skip=lambda m: (_ for _ in ()).throw(RuntimeError(m)); sys.modules["pytest"]=p
sys.path[:0]=["src","."]
import torch, moepress, transformers
from tests import zoo
from tests.squeeze import *
from moepress.checkpoint.load import load_model, quiet
print(torch.__version__, transformers.__version__, torch.cuda.get_device_name())
def cu(b): return {k:v.cuda() for k,v in b.items()}
@torch.no_grad()
def L(m,n):
    torch.manual_seed(0); return m(**cu(zoo.batch(m,n))).logits.float().cpu()
with quiet():
  for n in ("qwen3_moe","mixtral","gpt_oss","deepseek_v3","jamba","switch_transformers","longcat_flash","llama4"):
    try:
        d=tempfile.mkdtemp(); o=build(n); o.save_pretrained(d+"/src"); o=type(o).from_pretrained(d+"/src",dtype=torch.bfloat16); m=copy.deepcopy(o); specs=squeeze(m,"redirect"); full=duplicated(o,m).cuda()
        save_compact(m,specs,d+"/a"); l=load_model(d+"/a",device="cuda")
        l.save_pretrained(d+"/b"); assert_same_files(Path(d+"/a"),Path(d+"/b"))
        res={}
        for impl in ("eager","batched_mm","grouped_mm"):
            try: l.set_experts_implementation(impl); full.set_experts_implementation(impl)
            except Exception as e: res[impl]=type(e).__name__; res["default"]=apart(L(l,n),L(full,n)); break
            res[impl]=apart(L(l,n),L(full,n))
        print(n,"bf16 redirect vs duplicated",res,flush=True)
        for kw in ({},{"offload_buffers":True}):
            total=sum(t.nbytes for t in l.state_dict().values())
            try:
                s=type(l).from_pretrained(d+"/a",device_map="auto",max_memory={0:int(total*0.6),"cpu":"4GB"},**kw)
                hooks={str(v) for v in s.hf_device_map.values()}
                print("   offload",kw,hooks,"diff",apart(L(s,n),L(l,n)),flush=True)
                s.save_pretrained(d+"/c"); assert_same_tensors(load_model(d+"/c"),load_model(d+"/a"))
            except Exception as e: print("   offload",kw,type(e).__name__,str(e)[:200])
        if n in ("qwen3_moe","gpt_oss"):
            x=zoo.batch(l,n,batch=1)
            g=l.generate(**cu(x),max_new_tokens=8); h=full.generate(**cu(x),max_new_tokens=8); print("   generate equal",torch.equal(g,h))
            with torch.no_grad():
                c=torch.compile(l,fullgraph=True); e=torch.compile(full,fullgraph=True)
                y=l(**cu(x),use_cache=False).logits; z=c(**cu(x),use_cache=False).logits; v=e(**cu(x),use_cache=False).logits; w=full(**cu(x),use_cache=False).logits
                print("   compile inductor compact",apart(z.float(),y.float()),"vanilla",apart(v.float(),w.float()))
    except Exception as e: print(n,"FAIL",type(e).__name__,str(e)[:300]); traceback.print_exc()
