"""The forest's rules a second time, as plainly as possible: lists of dicts, scanned and sorted at every operation."""

NEVER = -1


class NaiveForest:
    """States are tuples, events (step, number) pairs in dicts; a node is named (prompt, state)."""

    def __init__(self, max_model_len, min_remaining, max_events_per_parent=0, max_events=0, max_nodes=0):
        self.room = max_model_len - min_remaining
        self.bounds = max_events_per_parent, max_events, max_nodes
        self.trees, self.nodes, self.events = [], [], []  # in creation order
        self.dropped = 0
        self.born = 0  # nodes and events are numbered by one sequence; only the order matters
        self.number = 0

    def _tree(self, prompt):
        return next((tree for tree in self.trees if tree["prompt"] == prompt), None)

    def _node(self, prompt, state):
        return next((node for node in self.nodes if (node["prompt"], node["state"]) == (prompt, state)), None)

    def _add_node(self, prompt, state, parent, step):
        self.born += 1
        node = {"prompt": prompt, "state": state, "parent": parent, "created": step, "active": True, "born": self.born}
        self.nodes.append(node | {"rollout": NEVER, "dispatch": NEVER, "sft": NEVER})

    def _candidates(self, tree):
        return [n for n in self.nodes if n["prompt"] == tree["prompt"] and n["active"] and n["parent"] is not None]

    def _waiting(self, node=None):
        return [e for e in self.events if not e["flying"] and (node is None or e["node"] is node)]

    def _pick(self, trees, clock, n):
        return sorted(trees, key=lambda tree: (tree[clock], tree["created"], tree["prompt"]))[:n]

    def observe(self, prompt, state, k_succ, k_total, step, failed):
        """Returns the number of events added."""
        root = prompt == state
        if root and failed and self._tree(prompt) is None:
            self.trees.append({"prompt": prompt, "created": step, "rollout": NEVER, "dispatch": NEVER, "sft": NEVER})
            self._add_node(prompt, prompt, None, step)
        node = self._node(prompt, state)
        if node is None or not (node["active"] or root):
            return 0
        node["rollout"] = step
        if k_succ >= k_total:
            node["active"] = False
            return 0
        node["active"] = True
        for _ in range(failed):
            self._enqueue(node, step)
        return failed

    def _enqueue(self, node, step):
        per_parent, in_all, max_nodes = self.bounds
        event = {"number": self.number, "node": node, "created": step, "flying": False}
        self.number += 1
        self.events.append(event)
        if max_nodes and sum(n["prompt"] == node["prompt"] for n in self.nodes) >= max_nodes:
            self._drop([event])
        mine = sorted(self._waiting(node), key=lambda e: (e["created"], e["number"]))
        if per_parent and len(mine) > per_parent:
            self._drop(mine[:1])
        if in_all and len(self._waiting()) > in_all:
            self._drop(self._waiting()[:1])

    def _drop(self, events):
        self.dropped += len(events)
        self.events = [e for e in self.events if not any(e is other for other in events)]

    def sample(self, n, step, clock="rollout"):
        """States for rollout, or for SFT (no exclusion of this step's trees)."""
        trees = [t for t in self.trees if self._candidates(t) and (clock == "sft" or t[clock] != step)]
        states = []
        for tree in self._pick(trees, clock, n):
            node = min(self._candidates(tree), key=lambda n: (n[clock], n["created"], n["born"]))
            tree[clock] = node[clock] = step
            states.append(node["state"])
        return states

    def dispatch(self, n, step):
        def parents(tree):
            return [x for x in self.nodes if x["prompt"] == tree["prompt"] and x["active"] and self._waiting(x)]

        numbers = []
        for tree in self._pick([t for t in self.trees if parents(t)], "dispatch", n):
            node = min(parents(tree), key=lambda n: (n["dispatch"], n["created"], n["born"]))
            event = max(self._waiting(node), key=lambda e: (e["created"], e["number"]))
            tree["dispatch"] = node["dispatch"] = step
            event["flying"] = True
            numbers.append(event["number"])
        return numbers

    def requeue(self, number):
        for event in self.events:
            if event["number"] == number:
                event["flying"] = False

    def result(self, number, state, suffix, step):
        event = next((e for e in self.events if e["number"] == number), None)
        if event is None:
            return "stale_unknown_event"
        self.events.remove(event)
        parent = event["node"]
        prompt = parent["prompt"]
        if not parent["active"]:
            return "stale_parent_inactive"
        if state is None:
            return "failed"
        if len(state) <= len(parent["state"]) or state[: len(parent["state"])] != parent["state"] or len(state) > self.room:
            return "invalid"
        if self._node(prompt, state) is not None:
            return "duplicate"
        if not suffix:
            return "invalid"
        max_nodes = self.bounds[2]
        if max_nodes and sum(n["prompt"] == prompt for n in self.nodes) >= max_nodes:
            return "refused"
        self._add_node(prompt, state, parent, step)
        if max_nodes and sum(n["prompt"] == prompt for n in self.nodes) >= max_nodes:
            self._drop([e for e in self._waiting() if e["node"]["prompt"] == prompt])
        return "child_created"

    def cleanup(self):
        busy = {e["node"]["prompt"] for e in self.events} | {n["prompt"] for n in self.nodes if n["active"]}
        gone = [t for t in self.trees if t["prompt"] not in busy]
        self.trees = [t for t in self.trees if t["prompt"] in busy]
        self.nodes = [n for n in self.nodes if n["prompt"] in busy]
        return len(gone)
