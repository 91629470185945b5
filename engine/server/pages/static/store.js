// The conversations of this browser, in IndexedDB: it holds more than localStorage's 5 MB, and its
// transactions keep tabs from overwriting each other.

import { BASE } from "./common.js";
import { newId } from "./conversation.js";

const NAME = `kiln ${BASE.pathname}`; // servers behind one address each have their own
const TABLE = "conversations";
const channel = new BroadcastChannel(NAME);
const memory = new Map(); // where the browser keeps nothing, such as in some private windows
let opening = null;

/** Return the database; null where the browser keeps nothing. */
function database() {
  opening ??= new Promise((resolve) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
  return opening;
}

/** Run `work(table, done)` in one transaction, and return what it gives to `done`. */
async function transact(mode, work) {
  const transaction = (await database()).transaction(TABLE, mode);
  return new Promise((resolve, reject) => {
    let result;
    transaction.oncomplete = () => resolve(result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
    work(transaction.objectStore(TABLE), (value) => { result = value; });
  });
}

/** Whether conversations survive the page. */
export async function isKept() {
  return (await database()) !== null;
}

/** Return all conversations, newest first. */
export async function all() {
  const found = (await isKept())
    ? await transact("readonly", (table, done) => { table.getAll().onsuccess = (event) => done(event.target.result); })
    : [...memory.values()];
  return found.sort((one, other) => other.updated - one.updated);
}

/** Return a conversation; undefined if there is none. */
export async function get(id) {
  if (!(await isKept())) return memory.get(id);
  return transact("readonly", (table, done) => { table.get(id).onsuccess = (event) => done(event.target.result); });
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
  await transact("readwrite", (table) => {
    table.get(conversation.id).onsuccess = (event) => {
      if (event.target.result && event.target.result.revision !== conversation.revision) {
        conversation.id = newId();
        conversation.title += " (from another tab)";
      }
      conversation.revision += 1;
      table.put(conversation);
    };
  });
  channel.postMessage(conversation.id);
}

/** Delete one conversation. */
export async function remove(id) {
  if (!(await isKept())) memory.delete(id);
  else await transact("readwrite", (table) => { table.delete(id); });
  channel.postMessage(id);
}

/** Delete all conversations. */
export async function removeAll() {
  if (!(await isKept())) memory.clear();
  else await transact("readwrite", (table) => { table.clear(); });
  channel.postMessage(null);
}

/** Call `changed(id)` when another tab changes a conversation; null: all of them. */
export function whenChanged(changed) {
  channel.onmessage = (event) => changed(event.data);
}
