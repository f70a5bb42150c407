"""Create a tenant on a running server, watch its job, use it, delete it: .venv/bin/python examples/manage_tenant.py"""

import os
import tempfile
import time
from pathlib import Path

from hplm_client import Client, ManageClient

QUESTIONS = ("Where is {}?", "Who sells {}?", "How much is {}?", "Do you have {}?", "When does {} arrive?")
STATEMENTS = ("I like {}.", "We sell {} every day.", "She has bought {}.", "Here is {}.", "They ran out of {} today.")
THINGS = ("the bread", "fresh fish", "a blue coat", "the old map", "green tea", "the last train")

address = os.environ.get("HPLM_GRPC", "grpc://127.0.0.1:8001")
with tempfile.TemporaryDirectory() as folder, ManageClient(address) as manage, Client(address) as client:
    train = Path(folder) / "train.csv"
    rows = [f"{form.format(thing)},question" for form in QUESTIONS for thing in THINGS]
    rows += [f"{form.format(thing)},statement" for form in STATEMENTS for thing in THINGS]
    train.write_text("\n".join(["text,label", *rows]))
    job = manage.create_tenant("questions", train=manage.upload(train), settings={"epochs": 8})
    for event in manage.watch(job):
        print(f"{event.state} {event.step} {event.progress:.0%}")
    manage.wait(job)  # raises the job's error if it failed
    print(manage.show_tenant("questions").about["scores"])
    time.sleep(1)  # a published version is served within a second
    print(client.predict("questions", "Where can I buy a red hat?").label)
    manage.delete_tenant("questions")
