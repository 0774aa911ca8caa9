// Light or dark as the reader chose last, before anything is painted; a page opened from a disk may have no storage.
"use strict";
try {
  const chosen = localStorage.getItem("rocktokens-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* the system's wish stands */ }
