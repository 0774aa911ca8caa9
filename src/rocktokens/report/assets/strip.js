// The token strip: one rollout, token by token, coloured by a measure; and the panel of what is known of one token.
//
// 1. A measure becomes one of ten levels, between the 5th and the 95th percentile of the strips on show; the level is a
//    class, so that the colours of both themes and the thickness of the underline are the style sheet's.
// 2. Model output is hostile: text reaches the page only as text nodes, whitespace gets a mark, and what cannot be seen
//    or moves other text about is written as its code point.
// 3. One token can be reached by Tab; arrow keys, Home and End move on from there. What has the focus is selected.

"use strict";

const RockStrip = (() => {
  const MEASURES = {
    kl: { label: "kl", hint: "divergence of the student from the teacher, nats" },
    entropy_student: { label: "student entropy", hint: "nats" },
    entropy_teacher: { label: "teacher entropy", hint: "nats" },
    log_ratio: { label: "log-ratio", hint: "log-probability of the token, student minus teacher, nats" },
    grad_norm: { label: "gradient norm", hint: "length of the loss's gradient in the logits" },
    weight: { label: "weight", hint: "of the token in the training loss" },
  };
  const LEVELS = 10;
  const LONGEST = 48;
  const MARKS = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍" };
  // Control and format characters, lone surrogates, odd spaces, fillers, variation selectors, and what would be taken
  // for a mark: display/text.py, which has already written carriage returns as their mark.
  const UNSEEN = new RegExp(
    "[\\p{C}\\p{Zl}\\p{Zp}\\u00a0\\u1680\\u2000-\\u200a\\u202f\\u205f\\u3000" +
      "\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u2800\\u3164\\uffa0" +
      "\\u180b-\\u180f\\ufe00-\\ufe0f\\u{e0100}-\\u{e01ef}·⏎⇥]",
    "u",
  );

  // Elements and text. A child that is a string becomes a text node, whatever it says.
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value === true) made.setAttribute(key, "");
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, String(value));
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  function visible(text, longest = LONGEST) {
    let shown = /^\p{M}/u.test(text) ? "◌" : "";
    for (const character of text) {
      const code = character.codePointAt(0);
      const next = MARKS[character] ?? (UNSEEN.test(character) ? codePoint(code) : character);
      if (shown.length + next.length > longest) return shown + "…";
      shown += next;
    }
    return shown || "∅";
  }

  function codePoint(code) {
    return code <= 0xffff ? "\\u" + code.toString(16).padStart(4, "0") : "\\U" + code.toString(16).padStart(8, "0");
  }

  function number(value, digits = 3) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "—";
    const size = Math.abs(value);
    if (size !== 0 && (size < 10 ** -digits || size >= 1e5)) return minus(value.toExponential(1));
    return minus(value.toFixed(size >= 100 ? 1 : digits));
  }

  function minus(text) {
    return text.replace(/-/g, "−");
  }

  function percent(share) {
    if (share === null || share === undefined || !Number.isFinite(share)) return "—";
    return share > 0 && share < 0.0005 ? "< 0.1 %" : (100 * share).toFixed(1) + " %";
  }

  function valueOf(token, measure) {
    if (measure !== "log_ratio") return token[measure];
    if (token.logp_student === null || token.logp_teacher === null) return null;
    return token.logp_student - token.logp_teacher;
  }

  function scaleOf(strips, measure) {
    const values = strips
      .flatMap((strip) => strip.tokens.map((token) => valueOf(token, measure)))
      .filter(Number.isFinite)
      .sort((a, b) => a - b);
    return { low: quantile(values, 0.05), high: quantile(values, 0.95) };
  }

  function quantile(sorted, share) {
    if (!sorted.length) return null;
    const at = share * (sorted.length - 1);
    const below = sorted[Math.floor(at)];
    return below + (at % 1) * (sorted[Math.ceil(at)] - below);
  }

  function levelOf(value, { low, high }) {
    if (!Number.isFinite(value) || low === null) return "none";
    const share = high > low ? (value - low) / (high - low) : Number(value > high);
    return Math.round(Math.min(1, Math.max(0, share)) * (LEVELS - 1));
  }

  function spoken(token, measure) {
    const rock = token.rock_rank === null ? "" : `, rock ${token.rock_rank}`;
    return `${visible(token.text)}${rock}, ${MEASURES[measure].label} ${number(valueOf(token, measure))}`;
  }

  function tokenElement(token, measure, scale) {
    const classes = ["strip-token", `level-${levelOf(valueOf(token, measure), scale)}`];
    if (token.rock_rank !== null) classes.push("strip-rock");
    return element(
      "span",
      {
        class: classes.join(" "),
        role: "option",
        tabindex: -1,
        "aria-selected": "false",
        "aria-label": spoken(token, measure),
        "data-position": token.position,
        "data-token": token.token_id,
      },
      visible(token.text),
    );
  }

  // Draw a strip and return what moves about in it: select(position, focus), rock(step) and tokens.
  // options: measure, scale (of scaleOf; default: this strip's), label, selected, onSelect, onHover (token or null).
  function draw(host, strip, options = {}) {
    const measure = options.measure || "kl";
    const scale = options.scale || scaleOf([strip], measure);
    const label = options.label || `Tokens of rollout ${strip.rollout_id}`;
    const list = element("div", {
      class: "strip",
      role: "listbox",
      "aria-label": label,
      "aria-orientation": "horizontal",
    });
    const spans = strip.tokens.map((token) => tokenElement(token, measure, scale));
    spans.forEach((span, index) => {
      list.append(span);
      if (strip.tokens[index].text.includes("\n")) list.append(element("br"));
    });
    const indexOf = new Map(strip.tokens.map((token, index) => [token.position, index]));
    let current = -1;

    function mark(index, focus) {
      if (current >= 0) spans[current].setAttribute("aria-selected", "false");
      for (const span of list.querySelectorAll('[tabindex="0"]')) span.tabIndex = -1;
      current = index;
      if (spans.length) spans[Math.max(0, index)].tabIndex = 0;
      if (index < 0) return;
      spans[index].setAttribute("aria-selected", "true");
      if (focus) spans[index].focus();
    }

    function choose(index) {
      if (index === current || index < 0 || index >= spans.length) return;
      mark(index, true);
      if (options.onSelect) options.onSelect(strip.tokens[index]);
    }

    function rock(step) {
      for (let index = current + step; index >= 0 && index < spans.length; index += step) {
        if (strip.tokens[index].rock_rank !== null) return choose(index);
      }
      return undefined;
    }

    const tokenAt = (event) => {
      const span = event.target.closest?.(".strip-token");
      return span ? Number(span.dataset.position) : null;
    };
    for (const kind of ["focusin", "click"]) {
      list.addEventListener(kind, (event) => {
        const position = tokenAt(event);
        if (position !== null) choose(indexOf.get(position));
      });
    }
    list.addEventListener("keydown", (event) => {
      const focused = indexOf.get(tokenAt(event));
      const target = focused === undefined ? undefined : keyTarget(event.key, focused, spans);
      if (target === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      choose(target);
    });
    if (options.onHover) {
      list.addEventListener("pointerover", (event) => {
        const position = tokenAt(event);
        options.onHover(position === null ? null : strip.tokens[indexOf.get(position)]);
      });
      list.addEventListener("pointerleave", () => options.onHover(null));
    }
    host.replaceChildren(list);
    mark(indexOf.get(options.selected) ?? -1, false);
    return {
      tokens: strip.tokens,
      rock,
      select: (position, focus = false) => mark(indexOf.get(position) ?? -1, focus),
    };
  }

  function keyTarget(key, index, spans) {
    switch (key) {
      case "ArrowRight":
        return index + 1;
      case "ArrowLeft":
        return index - 1;
      case "Home":
        return 0;
      case "End":
        return spans.length - 1;
      case "ArrowDown":
        return nearestInLine(index, spans, 1);
      case "ArrowUp":
        return nearestInLine(index, spans, -1);
      case "Enter":
      case " ":
        return index;
      default:
        return undefined;
    }
  }

  // The token of the next line, down or up, that lies nearest.
  function nearestInLine(index, spans, step) {
    const from = spans[index].getBoundingClientRect();
    let line = null,
      best = index,
      distance = Infinity;
    for (let at = index + step; at >= 0 && at < spans.length; at += step) {
      const box = spans[at].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < 4) continue;
      if (line === null) line = box.top;
      if (Math.abs(box.top - line) >= 4) break;
      const away = Math.abs(box.left + box.width / 2 - from.left - from.width / 2);
      if (away < distance) [best, distance] = [at, away];
    }
    return best;
  }

  function legend(measure, scale) {
    const steps = Array.from({ length: LEVELS }, (_, level) =>
      element("span", { class: `legend-step level-${level}` }),
    );
    return element(
      "span",
      { class: "legend", title: MEASURES[measure].hint },
      element("span", {}, number(scale.low && Math.abs(scale.low) < 5e-4 ? 0 : scale.low)),
      element("span", { class: "legend-scale", "aria-hidden": "true" }, ...steps),
      element("span", {}, number(scale.high)),
      element("span", {}, element("span", { class: "legend-rock", "aria-hidden": "true" }), "rock"),
    );
  }

  function chip(text) {
    return element("span", { class: "chip" }, visible(text));
  }

  // The numbers of one token, and what student and teacher would have written.
  function panel(host, token) {
    const facts = [
      ["position", String(token.position)],
      ["token id", String(token.token_id)],
      ["category", token.category ? token.category.replace(/_/g, " ") : "—"],
      ["rock", token.rock_rank === null ? "no" : `rank ${token.rock_rank}`],
      ...Object.keys(MEASURES).map((measure) => [MEASURES[measure].label, number(valueOf(token, measure))]),
      ...splitOf(token),
      ["student probability", percent(Math.exp(token.logp_student))],
      ["teacher probability", percent(Math.exp(token.logp_teacher))],
    ];
    host.replaceChildren(
      element("h3", {}, chip(token.text)),
      token.student_top && token.teacher_top
        ? element(
            "div",
            { class: "tops" },
            topTable("Student", token.student_top, token),
            topTable("Teacher", token.teacher_top, token),
          )
        : element("p", { class: "muted" }, "What else the models would have written was not traced (set trace.top_k)."),
      element(
        "dl",
        { class: "facts" },
        ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
      ),
    );
  }

  // How much of the kl only chooses between interchangeable tokens, where the trace says so.
  function splitOf(token) {
    if (token.kl_choice === null) return [];
    return [
      ["kl of the decision", number(token.kl - token.kl_choice)],
      ["kl of the choice", number(token.kl_choice)],
    ];
  }

  function topTable(who, top, token) {
    const rows = top.map(([id, text, logp]) => {
      const share = Math.exp(logp);
      return element(
        "tr",
        { class: id === token.token_id ? "sampled" : null },
        element("th", { scope: "row" }, chip(text)),
        element("td", {}, percent(share), element("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" })),
      );
    });
    return element("table", {}, element("caption", {}, who), element("tbody", {}, ...rows));
  }

  return { MEASURES, chip, draw, element, legend, minus, number, panel, percent, scaleOf, valueOf, visible };
})();
