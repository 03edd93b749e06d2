"use strict";
// What a reader has chosen, kept while the tab is open, also when a served page loads itself again.
const stored = {
  runs: "", // the page's runs: other pages of the same server or folder have choices of their own
  get(name) {
    try { return JSON.parse(sessionStorage.getItem(`${stored.runs} ${name}`)); } catch { return null; }
  },
  set(name, value) {
    try { sessionStorage.setItem(`${stored.runs} ${name}`, JSON.stringify(value)); } catch { /* storage may be forbidden */ }
  },
  // Give the controls of a form the values that are kept, as far as they still exist.
  restore(form) {
    for (const control of form.elements) {
      const value = control.name ? stored.get(control.name) : null;
      if (value === null) continue;
      if (control.type === "checkbox") control.checked = value === true;
      else if (control.type === "search" || [...control.options].some((option) => option.value === value)) control.value = value;
    }
  },
};
