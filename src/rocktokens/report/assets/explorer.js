// The explorer starts here: what the bar, the keys and the address do. Nothing is ever written.
//
// Text of models reaches the page as text nodes only (RockStrip.element).

"use strict";

(() => {
  const { $, TABLE, attempt, current, forgetData, go, isBundle, list, read, state, views, watchVersion } = Explorer;

  function listen() {
    $("run").addEventListener("change", (event) =>
      go({ ...TABLE, run: event.target.value, checkpoint: "", rollout: "", position: "", ban: "", page: "0" }),
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
    $("reload").addEventListener("click", () => {
      forgetData();
      read();
    });
    $("theme").addEventListener("click", () => go({ theme: isDark() ? "light" : "dark" }, { replace: true }));
    $("help-open").addEventListener("click", () => $("help").showModal());
    $("skip").addEventListener("click", (event) => {
      event.preventDefault();
      $("main").focus();
    });
    views.rollouts.listen();
    views.live.listen();
    for (const button of document.querySelectorAll("[data-opens]")) {
      button.addEventListener("click", () => togglePart(button, button.ariaExpanded !== "true"));
      $(button.dataset.opens).addEventListener("click", (event) => {
        if (button.ariaExpanded === "true" && event.target.closest("a, .row")) togglePart(button, false);
      });
    }
    for (const kind of ["click", "auxclick", "contextmenu"]) document.addEventListener(kind, bringUpToDate, true);
    document.addEventListener("keydown", onKey);
    addEventListener("popstate", read);
  }

  // Links are made when a part is drawn; what was chosen since belongs into where they lead.
  function bringUpToDate(event) {
    const followed = event.target.closest?.("a[data-go]");
    if (followed) current(followed);
  }

  // On a narrow screen a list lies behind a button, until something in it is chosen.
  function togglePart(button, isOpen) {
    button.ariaExpanded = String(isOpen);
    $(button.dataset.opens).classList.toggle("opened", isOpen);
    read(); // a list has no rows while it cannot be seen
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
      const search = document.querySelector(`#view-${state.view} input[type="search"]`);
      if (search?.checkVisibility()) search.focus();
    },
    n: () => inView()?.rock(1),
    N: () => inView()?.rock(-1),
    j: () => move(1),
    k: () => move(-1),
  };

  attempt(async () => {
    document.documentElement.classList.toggle("bundle", isBundle);
    await list();
    listen();
    read();
    watchVersion();
  });
})();
