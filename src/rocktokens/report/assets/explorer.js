// The explorer starts here: what the bar, the keys and the address do. Nothing is ever written.
//
// Text of models reaches the page as text nodes only (RockStrip.element).

"use strict";

(() => {
  const { $, ask, attempt, go, read, runs, state, views } = Explorer;

  function listen() {
    $("run").addEventListener("change", (event) =>
      go({ run: event.target.value, checkpoint: "", rollout: "", position: "", ban: "", page: "0" }),
    );
    $("checkpoint").addEventListener("change", (event) => go({ checkpoint: event.target.value }));
    $("run-b").addEventListener("change", (event) => go({ run_b: event.target.value, checkpoint_b: "" }));
    $("checkpoint-b").addEventListener("change", (event) => go({ checkpoint_b: event.target.value }));
    $("compare-rollout").addEventListener(
      "change",
      (event) => event.target.value && go({ rollout: event.target.value, position: "" }),
    );
    for (const select of document.querySelectorAll(".measure")) {
      select.addEventListener("change", (event) => go({ measure: event.target.value }));
    }
    $("theme").addEventListener("click", () => go({ theme: isDark() ? "light" : "dark" }, { replace: true }));
    $("help-open").addEventListener("click", () => $("help").showModal());
    $("skip").addEventListener("click", (event) => {
      event.preventDefault();
      $("main").focus();
    });
    views.rollouts.listen();
    document.addEventListener("keydown", onKey);
    addEventListener("popstate", read);
  }

  const isDark = () =>
    (state.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    const isTyping = event.target.matches("input, select, textarea");
    if (event.key === "Escape") {
      escape(event.target, isTyping);
    } else if (!isTyping && KEYS[event.key]) {
      event.preventDefault();
      KEYS[event.key]();
    }
  }

  function escape(target, isTyping) {
    if (isTyping) target.blur();
    else if (state.position !== "") go({ position: "" }, { replace: true });
  }

  const inView = () => views[state.view].strip?.();
  const move = (step) => state.view === "rollouts" && attempt(() => views.rollouts.move(step));
  const KEYS = {
    "?": () => $("help").showModal(),
    "/": () => {
      if (state.view !== "rollouts") go({ view: "rollouts" });
      $("filters").elements.text.focus();
    },
    n: () => inView()?.rock(1),
    N: () => inView()?.rock(-1),
    j: () => move(1),
    k: () => move(-1),
  };

  attempt(async () => {
    runs.push(...(await ask("runs", "runs")));
    listen();
    read();
  });
})();
