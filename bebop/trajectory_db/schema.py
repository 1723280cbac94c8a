"""Tables of ``trajectories.sqlite``, which ``writer`` and ``reader`` beside this file write and read.

Arrays are little-endian blobs of one number a token (``[T, M]`` row by row), as ``numpy.frombuffer`` reads them.
"""

FORMAT = 6

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);  -- format; mode (of monitor.trace); top (M at most)
CREATE TABLE prompts (
  prompt INTEGER PRIMARY KEY,   -- its number in the prompt stream
  task TEXT NOT NULL,
  text TEXT NOT NULL,           -- after the chat template
  ids BLOB NOT NULL,            -- int32 [P]
  question INTEGER,             -- which of a finite set, which is asked again each epoch; NULL: it is asked once
  epoch INTEGER NOT NULL DEFAULT 0,  -- how often the whole set was asked before
  gold TEXT                     -- the right answer, as the task has it; NULL: it has none, or it was not kept
);
CREATE TABLE answers (
  id INTEGER PRIMARY KEY,       -- prompt * group size + member
  step INTEGER NOT NULL,        -- the update that it was trained in, from 1
  prompt INTEGER NOT NULL,
  member INTEGER NOT NULL,      -- its place in the group, from 0
  system TEXT NOT NULL,         -- the decoding system in force when it was taken in
  reward REAL NOT NULL,
  timed_out INTEGER NOT NULL,
  length INTEGER NOT NULL,      -- T, what was read between turns included
  finish TEXT NOT NULL,         -- stop, length, abort
  version_first INTEGER NOT NULL,  -- weights of its first and of its last token
  version_last INTEGER NOT NULL,
  staleness INTEGER NOT NULL,   -- updates between its oldest token's weights and those it trains
  accept_length REAL,           -- tokens a cycle; NULL: not known
  accept_rate REAL,             -- accepted drafts over tested ones, all positions; NULL: none was tested
  overlap REAL,                 -- mean of sum min(p, q) over tested positions; NULL: not measured
  target_entropy REAL,          -- nats, over tested positions; NULL: not measured
  exact INTEGER NOT NULL,
  traced INTEGER NOT NULL,      -- whether ``tokens`` has the columns of ``bebop.trajectory.Trace`` for it
  text TEXT NOT NULL,           -- what the policy wrote, an empty line between turns
  turns INTEGER NOT NULL DEFAULT 1,
  written INTEGER NOT NULL DEFAULT 0,  -- tokens that the policy wrote
  ended TEXT NOT NULL DEFAULT 'answered',  -- answered (no environment), done, length, turns, tokens, seconds
  restarts INTEGER NOT NULL DEFAULT 0,  -- times that it began again, as its environment was lost
  cycles INTEGER,               -- that accept_length is a mean over; NULL: not kept
  tested INTEGER,               -- draft positions that accept_rate is a mean over; NULL: not kept; overlap and
                                -- target_entropy too, unless the engine measured some of them: see counts
  parts TEXT NOT NULL DEFAULT '{}',  -- JSON, name -> part of the reward; null: the part does not apply
  counts TEXT                   -- JSON, name -> sum over draft positions of what the system counts; NULL: not kept;
                                -- weighed: tested positions that those measured represent, the weight of overlap
);
CREATE INDEX answers_step ON answers (step);
CREATE INDEX answers_prompt ON answers (prompt);
CREATE TABLE tokens (
  answer INTEGER PRIMARY KEY,
  ids BLOB NOT NULL,            -- int32 [T]
  logprobs BLOB NOT NULL,       -- float32 [T], the engine's log p; NaN of what was read between turns
  versions BLOB NOT NULL,       -- int32 [T]
  trainer_logprobs BLOB,        -- float32 [T], the trainer's log p at the start of the update; NULL: not kept
  drafter_names TEXT,           -- JSON list; this and what follows as in ``Trace``; NULL: not traced
  verdicts BLOB,                -- int8 [T]
  cycles BLOB,                  -- int32 [T]
  drafters BLOB,                -- int8 [T]
  drafts BLOB,                  -- int32 [T]
  draft_target_probs BLOB,      -- float32 [T]
  draft_probs BLOB,             -- float32 [T]
  overlap BLOB,                 -- float32 [T]
  target_entropy BLOB,          -- float32 [T]
  draft_entropy BLOB,           -- float32 [T]
  target_ids BLOB,              -- int32 [T, M]
  target_top BLOB,              -- float16 [T, M]
  draft_ids BLOB,               -- int32 [T, M]
  draft_top BLOB,               -- float16 [T, M]
  turns BLOB                    -- int32 [T], the turn that wrote it, from 0; -i: read before turn i; NULL: one turn
);
CREATE TABLE pieces (id INTEGER PRIMARY KEY, text TEXT NOT NULL);  -- the text of each token id that occurs above
"""

# Columns of ``tokens`` with one number a token, and those with M.
COLUMNS = {
    "ids": "<i4", "logprobs": "<f4", "versions": "<i4", "trainer_logprobs": "<f4", "verdicts": "<i1", "cycles": "<i4",
    "drafters": "<i1", "drafts": "<i4", "draft_target_probs": "<f4", "draft_probs": "<f4", "overlap": "<f4",
    "target_entropy": "<f4", "draft_entropy": "<f4", "target_ids": "<i4", "target_top": "<f2", "draft_ids": "<i4",
    "draft_top": "<f2", "turns": "<i4",
}  # fmt: skip
