import time
from rungwise.ladder.tracking import mirror_folder, mirror_forecast, is_mirrored
from rungwise.ladder.home import resolve_tracking
from rungwise.ladder.predict import load_family_runs, forecast_runs
def test_x(registered_home, tmp_path):
    uri=resolve_tracking(registered_home)
    for f in sorted((registered_home/"tiny"/"runs").iterdir()):
        t=time.time(); mirror_folder(f,uri); print(f.name, round(time.time()-t,2), (f/"metrics.jsonl").stat().st_size)
        assert is_mirrored(f,uri)
    t=time.time()
    (file,)=(registered_home/"tiny"/"forecasts").glob("*.json")
    mirror_forecast(file,uri); print("forecast", time.time()-t)
    here=load_family_runs("tiny",home=registered_home)
    t=time.time()
    there=load_family_runs("tiny",home=tmp_path/"none",tracking=uri); print("load", time.time()-t)
    assert there.registered==here.registered
    assert forecast_runs(there)==forecast_runs(here)
