from pathlib import Path
import tempfile, numpy as np
from dataclasses import replace
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.engine.test_layer_ranges import *
for shape in (tiny.config(upper_layers=3), replace(tiny.config(upper_layers=3), relative_buckets=8)):
  for batching in ("packed","naive","turbo","concat"):
   for quant in ("none","int8"):
    with tempfile.TemporaryDirectory() as t:
        base = base_of(Path(t), shape)
        try: eng = parts_of(base,(1,2),batching=batching, **({"quantization":"int8","dtype":"auto"} if quant=="int8" else {}))[1]
        except Exception as e: print(batching,quant,"ERR",str(e)[:80]); continue
        tenants=[t.with_adapters([eng.slots.in_layers(t.packed)]) for t in tenants_of(base)]
        rng=np.random.default_rng(0); H=base.config.hidden_size
        for lens in ([7,7],[7,9]):
          a=EngineRequest(tenants[0], rng.standard_normal((lens[0],H)).astype(np.float32))
          for bad in (1e20,1e38,3e38):
            b=EngineRequest(tenants[1], np.full((lens[1],H),bad,np.float32)*rng.choice([-1,1],(lens[1],H)).astype(np.float32))
            alone=eng.run([a])[0]; 
            for order in ([a,b],[b,a]):
                out=eng.run(order)[0 if order[0] is a else 1]
                d=np.abs(out-alone).max()
                if not d<1e-4: print(batching,quant,lens,bad,"first" if order[0] is a else "second","DIFF",d)
        print("done",batching,quant)
