// The conversations of this browser, in IndexedDB: it holds more than localStorage's 5 MB, and its
// transactions keep tabs from overwriting each other.

import { BASE } from "./common.js";
import { newId } from "./conversation.js";

const NAME = `kiln ${BASE.pathname}`; // servers behind one address each have their own
const [WHOLE, TITLES] = ["conversations", "titles"]; // the list needs no more than titles
const channel = new BroadcastChannel(NAME);
const memory = new Map(); // where the browser keeps nothing, such as in some private windows
let opening = null;

/** Return the database; null where the browser keeps nothing. */
function database() {
  opening ??= new Promise((resolve) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      for (const name of [WHOLE, TITLES]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
  return opening;
}

/** Run `work(whole, titles, done)` in one transaction, and return what it gives to `done`. */
async function transact(mode, work) {
  const transaction = (await database()).transaction([WHOLE, TITLES], mode);
  return new Promise((resolve, reject) => {
    let result;
    transaction.oncomplete = () => resolve(result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
    const done = (event) => { result = event.target.result; };
    work(transaction.objectStore(WHOLE), transaction.objectStore(TITLES), done);
  });
}

/** Whether conversations survive the page. */
export async function isKept() {
  return (await database()) !== null;
}

/** Return the id, title and time of all conversations, newest first. */
export async function titles() {
  const found = (await isKept())
    ? await transact("readonly", (whole, titles, done) => { titles.getAll().onsuccess = done; })
    : [...memory.values()];
  return found.sort((one, other) => other.updated - one.updated);
}

/** Return all conversations. */
export async function all() {
  if (!(await isKept())) return [...memory.values()];
  return transact("readonly", (whole, titles, done) => { whole.getAll().onsuccess = done; });
}

/** Return a conversation; undefined if there is none. */
export async function get(id) {
  if (!(await isKept())) return memory.get(id);
  return transact("readonly", (whole, titles, done) => { whole.get(id).onsuccess = done; });
}

/**
 * Keep a conversation. If another tab has changed it since it was read, this one becomes a
 * conversation of its own, with a new id, so that both are kept.
 */
export async function save(conversation) {
  conversation.updated = Date.now();
  if (!(await isKept())) {
    memory.set(conversation.id, conversation);
    return;
  }
  await transact("readwrite", (whole, titles) => {
    whole.get(conversation.id).onsuccess = (event) => {
      if (event.target.result && event.target.result.revision !== conversation.revision) {
        conversation.id = newId();
        conversation.title += " (from another tab)";
      }
      conversation.revision += 1;
      whole.put(conversation);
      titles.put({ id: conversation.id, title: conversation.title, updated: conversation.updated });
    };
  });
  channel.postMessage(conversation.id);
}

/** Delete one conversation. */
export async function remove(id) {
  if (!(await isKept())) memory.delete(id);
  else await transact("readwrite", (whole, titles) => { whole.delete(id); titles.delete(id); });
  channel.postMessage(id);
}

/** Delete all conversations. */
export async function removeAll() {
  if (!(await isKept())) memory.clear();
  else await transact("readwrite", (whole, titles) => { whole.clear(); titles.clear(); });
  channel.postMessage(null);
}

/** Call `changed(id)` when another tab changes a conversation; null: all of them. */
export function whenChanged(changed) {
  channel.onmessage = (event) => changed(event.data);
}
