"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  // -- words --------------------------------------------------------------------------------------------------------

  const scaled = (value, step, names) => {
    let i = 0;
    while (Math.abs(value) >= step && i < names.length - 1) { value /= step; i += 1; }
    const size = Math.abs(value);
    return `${i === 0 ? Math.round(value) : value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2)} ${names[i]}`;
  };
  const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
  const seconds = (value) => value >= 1 ? `${value.toPrecision(3)} s` : value >= 1e-3 ? `${(value * 1e3).toPrecision(3)} ms` : `${(value * 1e6).toPrecision(3)} µs`;

  const strip = (box, key) => {
    box.replaceChildren();
    const plan = data.plans[key];
    if (!plan) return;
    const said = [];
    plan.strip.forEach((number, i) => {
      const choice = data.choices[number];
      const tile = document.createElement("span");
      tile.className = `tile ${choice.kind}`;
      tile.textContent = choice.letter;
      tile.title = `${data.units[i]}: ${choice.text}`;
      box.append(tile);
      said.push(choice.kind);
    });
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", said.map((kind, i) => `${data.units[i]} ${kind}`).join(", "));
  };

  // -- a vertical line that is dragged, or moved by keys --------------------------------------------------------------

  const slider = (plot, handle, place, keys) => {
    const at = (event) => {
      const frame = plot.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - frame.left) / frame.width));
    };
    let dragging = false;
    handle.addEventListener("pointerdown", (event) => {
      dragging = true;
      handle.setPointerCapture(event.pointerId);
      handle.focus();
      event.preventDefault();
    });
    handle.addEventListener("pointermove", (event) => { if (dragging) place(at(event)); });
    for (const end of ["pointerup", "pointercancel"]) handle.addEventListener(end, () => { dragging = false; });
    plot.addEventListener("click", (event) => { if (!handle.contains(event.target)) place(at(event)); });
    handle.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 5, PageDown: -5, Home: -Infinity, End: Infinity }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      keys(move);
    });
  };
  const show = (handle, share, value, text) => {
    handle.setAttribute("x", `${share * 100}%`);
    handle.setAttribute("aria-valuenow", value);
    handle.setAttribute("aria-valuetext", text);
  };

  // -- the budget ---------------------------------------------------------------------------------------------------

  const plane = byId("plane"), budgetHandle = byId("budget-handle");
  if (plane && budgetHandle && data.thresholds.length) {
    const low = Number(plane.dataset.low), high = Number(plane.dataset.high);
    budgetHandle.setAttribute("aria-valuemin", low);
    budgetHandle.setAttribute("aria-valuemax", high);
    const stops = [...new Set([...data.thresholds.map((t) => t.bytes), data.budget_bytes])].filter((b) => b >= low && b <= high).sort((a, b) => a - b);
    let now = data.budget_bytes;
    const tell = (key) => {
      const plan = data.plans[key], word = data.said[plan.basis];
      const interval = plan.low ? ` (${seconds(plan.low)} to ${seconds(plan.high)})` : "";
      return `${word}: ${plan.name}, ${seconds(plan.seconds)}${interval}, peak ${bytes(plan.peak)}${key === data.best ? " — the answer of this run" : ""}`;
    };
    const place = (budget) => {
      now = Math.round(Math.min(high, Math.max(low, budget)));
      const known = data.thresholds.filter((t) => t.bytes <= now).pop();
      const tried = known && known.tried, predicted = known && known.predicted;
      const more = now - data.budget_bytes;
      byId("known-budget").textContent = `Budget ${bytes(now)}${more ? ` (${more > 0 ? "+" : "−"}${bytes(Math.abs(more))})` : `, as asked${data.headroom ? ` less ${data.headroom}` : ""}`}`;
      byId("known-tried").textContent = tried ? tell(tried) : `No plan is known to fit this budget${predicted ? ", but:" : "."}`;
      strip(byId("known-strip"), tried);
      byId("known-predicted").textContent = predicted ? tell(predicted) : "";
      strip(byId("known-predicted-strip"), predicted);
      for (const mark of plane.querySelectorAll(".picked")) mark.classList.remove("picked");
      for (const point of plane.querySelectorAll("[data-plan]")) {
        if (point.dataset.plan === tried || point.dataset.plan === predicted) point.querySelector(".mark").classList.add("picked");
      }
      show(budgetHandle, (now - low) / (high - low), now, byId("known-budget").textContent);
    };
    const keys = (move) => {
      if (!Number.isFinite(move)) return place(move > 0 ? stops[stops.length - 1] : stops[0]);
      const beyond = stops.filter((b) => move > 0 ? b > now : b < now);
      if (!beyond.length) return;
      const far = Math.min(Math.abs(move), beyond.length) - 1;
      place(move > 0 ? beyond[far] : beyond[beyond.length - 1 - far]);
    };
    slider(plane, budgetHandle, (share) => place(low + share * (high - low)), keys);
    place(now);
  }

  // -- the tape -----------------------------------------------------------------------------------------------------

  const steps = byId("steps"), momentHandle = byId("moment-handle");
  if (steps && momentHandle && data.tapes.length) {
    const longest = Number(steps.dataset.longest);
    const length = (tape) => tape.seconds === null ? Math.max(...tape.ops) + 1 : tape.seconds;
    let chosen = data.tapes.length - 1, sample = 0;
    const purposes = ["kept for backward", "made again", "brought back", "logits and loss", "transient"];
    const row = (table, cells) => {
      const line = document.createElement("tr");
      cells.forEach(([text, style], i) => {
        const cell = document.createElement(i || table.id === "alive" ? "td" : "th");
        if (cell.tagName === "TH") cell.scope = "row";
        if (style) cell.className = style;
        cell.textContent = text;
        line.append(cell);
      });
      table.tBodies[0].append(line);
      return line;
    };
    const ranked = (table, sums, most) => {
      table.tBodies[0].replaceChildren();
      const rows = [...sums].filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
      const rest = rows.slice(most);
      const shown = rows.slice(0, most);
      if (rest.length) shown.push([`${rest.length} more`, rest.reduce((sum, [, size]) => sum + size, 0)]);
      const top = Math.max(1, ...shown.map(([, size]) => size));
      for (const [name, size] of shown) {
        const line = row(table, [[name], [bytes(size), "n"], [""]]);
        const bar = document.createElement("span");
        bar.className = "bar";
        bar.style.width = `${(size / top * 90).toFixed(0)}px`;
        line.lastChild.append(bar);
      }
    };
    const look = () => {
      const tape = data.tapes[chosen], op = tape.ops[sample];
      const alive = tape.storages.filter((s) => s[1] <= op && s[2] >= op);
      const kinds = new Map([["weights, states, batch", tape.fixed[sample]], ["gradients", tape.growing[sample]], ["smaller tensors", tape.small[sample]]]);
      const layers = new Map([["smaller tensors", tape.small[sample]]]);
      for (const s of alive) {
        const kind = purposes[s[5]].includes(tape.kinds[s[4]]) ? purposes[s[5]] : `${tape.kinds[s[4]]}, ${purposes[s[5]]}`;
        kinds.set(kind, (kinds.get(kind) || 0) + s[0]);
        const layer = tape.units[s[3]] || "(rest of the model)";
        layers.set(layer, (layers.get(layer) || 0) + s[0]);
      }
      ranked(byId("by-kind"), kinds, 9);
      ranked(byId("by-layer"), layers, 9);
      const table = byId("alive");
      table.tBodies[0].replaceChildren();
      const length_ = length(tape), when = (share) => tape.seconds === null ? `${(share * 100).toFixed(0)} % of the ops` : seconds(share * length_);
      const sampleOf = (index) => { let i = tape.ops.findIndex((o) => o >= index); return tape.at[i < 0 ? tape.at.length - 1 : i]; };
      for (const s of [...alive].sort((a, b) => b[0] - a[0]).slice(0, 12)) {
        const reader = s[7] < 0 ? "nobody on record" : tape.words[s[7]] + (s[8] <= op ? " (done)" : "");
        row(table, [[bytes(s[0]), "n"], [tape.units[s[3]] || "—"], [s[6] < 0 ? "outside of ops" : tape.words[s[6]]], [reader], [when(Math.max(0, sampleOf(s[2]) - sampleOf(s[1]))), "n"]]);
      }
      const phase = (tape.phases.filter(([, from]) => from <= tape.at[sample]).pop() || [""])[0];
      const peak = Math.max(...tape.total) === tape.total[sample] ? ", the peak" : "";
      const text = `${tape.name}, ${phase}, at ${when(tape.at[sample])}: ${bytes(tape.total[sample])}${peak}`;
      byId("moment-said").textContent = text;
      show(momentHandle, tape.at[sample] * length_ / longest, sample, text);
      momentHandle.setAttribute("aria-valuemax", tape.ops.length - 1);
    };
    const nearest = (share) => {
      const tape = data.tapes[chosen], wanted = share * longest / length(tape);
      sample = tape.at.reduce((best, at, i) => Math.abs(at - wanted) < Math.abs(tape.at[best] - wanted) ? i : best, 0);
      look();
    };
    const keys = (move) => {
      const last = data.tapes[chosen].ops.length - 1;
      sample = Math.min(last, Math.max(0, Number.isFinite(move) ? sample + move : move > 0 ? last : 0));
      look();
    };
    const toPeak = () => { const total = data.tapes[chosen].total; sample = total.indexOf(Math.max(...total)); look(); };
    for (const input of document.querySelectorAll("input[name=tape]")) {
      input.addEventListener("change", () => { chosen = Number(input.value); toPeak(); });
    }
    slider(steps, momentHandle, nearest, keys);
    toPeak();
  }

  // -- strips, and the data -------------------------------------------------------------------------------------------

  if (byId("plan-strip") && data.best) strip(byId("plan-strip"), data.best);
  for (const box of document.querySelectorAll("[data-strip]")) strip(box, box.dataset.strip);
  const save = byId("save");
  if (save) save.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
})();
