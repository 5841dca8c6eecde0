"""Makes questions that a server of the Model Context Protocol answers: what time it is elsewhere.

    python3 prepare.py        # into data/

Only time zones without summer time are in it, so the answers are right on any day.
"""

import argparse
import json
import random
from pathlib import Path

# Name of a place in questions, its time zone, minutes east of Greenwich.
PLACES = [
    ("Tokyo", "Asia/Tokyo", 540),
    ("Seoul", "Asia/Seoul", 540),
    ("Shanghai", "Asia/Shanghai", 480),
    ("Singapore", "Asia/Singapore", 480),
    ("Manila", "Asia/Manila", 480),
    ("Bangkok", "Asia/Bangkok", 420),
    ("Jakarta", "Asia/Jakarta", 420),
    ("Dhaka", "Asia/Dhaka", 360),
    ("Kathmandu", "Asia/Kathmandu", 345),
    ("Kolkata", "Asia/Kolkata", 330),
    ("Karachi", "Asia/Karachi", 300),
    ("Dubai", "Asia/Dubai", 240),
    ("Riyadh", "Asia/Riyadh", 180),
    ("Istanbul", "Europe/Istanbul", 180),
    ("Moscow", "Europe/Moscow", 180),
    ("Nairobi", "Africa/Nairobi", 180),
    ("Johannesburg", "Africa/Johannesburg", 120),
    ("Lagos", "Africa/Lagos", 60),
    ("Algiers", "Africa/Algiers", 60),
    ("Accra", "Africa/Accra", 0),
    ("Reykjavik", "Atlantic/Reykjavik", 0),
    ("Buenos Aires", "America/Argentina/Buenos_Aires", -180),
    ("Caracas", "America/Caracas", -240),
    ("Bogota", "America/Bogota", -300),
    ("Lima", "America/Lima", -300),
    ("Phoenix", "America/Phoenix", -420),
    ("Honolulu", "Pacific/Honolulu", -600),
    ("Brisbane", "Australia/Brisbane", 600),
]
WORDINGS = [
    "It is {time} in {a}. What time is it in {b}?",
    "When it is {time} in {a}, what is the time in {b}?",
    "What time is it in {b} when clocks in {a} say {time}?",
]


def clock(minutes):
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


def tasks(count, seed):
    draws, seen = random.Random(seed), set()
    while len(seen) < count:
        (a, zone_a, east_a), (b, zone_b, east_b) = draws.sample(PLACES, 2)
        minutes = draws.randrange(0, 24 * 60, 5)
        question = draws.choice(WORDINGS).format(time=clock(minutes), a=a, b=b)
        if question in seen:
            continue
        seen.add(question)
        answer = clock(minutes - east_a + east_b)
        arguments = {"source_timezone": zone_a, "time": clock(minutes), "target_timezone": zone_b}
        call = {"function": {"name": "convert_time", "arguments": arguments}}
        demonstration = [{"content": "", "tool_calls": [call]}, f"<answer>{answer}</answer>"]
        yield {"question": question, "answer": answer, "demonstration": demonstration}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path, rows = args.out / "times.jsonl", list(tasks(args.count, args.seed))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} tasks")
