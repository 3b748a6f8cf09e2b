// Refuses calls for files below REFUSE_TOP, as file systems do that lack them. REFUSE has words
// such as "flock=37": a call and its errno. Loaded by LD_PRELOAD.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <unistd.h>

#define ALIAS(name, of) __asm__(".globl " #name "\n.set " #name ", " #of "\n")
#define REAL(type, name, ...) ((type (*)(__VA_ARGS__)) dlsym(RTLD_NEXT, #name))
#define BLOCK_SHARING 0x40049409  // FICLONE, linux/fs.h

// Return the errno of a call, -1 if it is not refused; REFUSE is read each time.
static int find_error(const char *call) {
  const char *words = getenv("REFUSE");
  size_t size = strlen(call);
  for (const char *at = words; at && *at; at = strchr(at, ' ') ? strchr(at, ' ') + 1 : NULL)
    if (!strncmp(at, call, size) && at[size] == '=') return atoi(at + size + 1);
  return -1;
}

static int is_below(const char *path) {
  const char *top = getenv("REFUSE_TOP");
  size_t size = top ? strlen(top) : 0;
  return size && !strncmp(path, top, size) && (!path[size] || path[size] == '/');
}

static int find_path(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, PATH_MAX - 1);
  path[size < 0 ? 0 : size] = 0;
  return size > 0;
}

static int is_open_below(int fd) {
  char path[PATH_MAX];
  return find_path(fd, path) && is_below(path);
}

static int is_name_below(int directory, const char *name) {
  char path[PATH_MAX];
  if (name[0] == '/') return is_below(name);
  if (directory == AT_FDCWD) return getcwd(path, sizeof path) && is_below(path);
  return is_open_below(directory);
}

static int is_directory(int fd) {
  struct stat status;
  return !fstat(fd, &status) && S_ISDIR(status.st_mode);
}

static int refuse(const char *call, int is_ours) {
  int saved = errno, error = is_ours ? find_error(call) : -1;
  errno = error > 0 ? error : saved;
  return error > 0;
}

int flock(int fd, int operation) {
  if (find_error("lock_stale") > 0) {
    static int count;
    char path[PATH_MAX];
    int is_lock = find_path(fd, path) && is_below(path) && strstr(path, "lock");
    if (is_lock && count++ % 5 == 0 && refuse("lock_stale", 1)) return -1;
  }
  if (refuse("flock", is_open_below(fd))) return -1;
  int mode = fcntl(fd, F_GETFL) & O_ACCMODE;
  int is_mismatch = (operation & LOCK_EX && mode == O_RDONLY) || (operation & LOCK_SH && mode == O_WRONLY);
  if (is_mismatch && refuse("flock_mode", is_open_below(fd))) return -1;
  return REAL(int, flock, int, int)(fd, operation);
}

int fsync(int fd) {
  if (refuse(is_directory(fd) ? "sync_directory" : "sync_file", is_open_below(fd))) return -1;
  return REAL(int, fsync, int)(fd);
}

int fdatasync(int fd) {
  if (refuse("sync_file", is_open_below(fd))) return -1;
  return REAL(int, fdatasync, int)(fd);
}

int syncfs(int fd) {
  if (refuse("syncfs", is_open_below(fd))) return -1;
  return REAL(int, syncfs, int)(fd);
}

int fchmod(int fd, mode_t mode) {
  if (refuse("chmod", is_open_below(fd))) return -1;
  return REAL(int, fchmod, int, mode_t)(fd, mode);
}

int chmod(const char *path, mode_t mode) {
  if (refuse("chmod", is_name_below(AT_FDCWD, path))) return -1;
  return REAL(int, chmod, const char *, mode_t)(path, mode);
}

int fchmodat(int directory, const char *path, mode_t mode, int flags) {
  if (refuse("chmod", is_name_below(directory, path))) return -1;
  return REAL(int, fchmodat, int, const char *, mode_t, int)(directory, path, mode, flags);
}

int linkat(int old, const char *path, int new, const char *name, int flags) {
  if (refuse("link", is_name_below(new, name))) return -1;
  return REAL(int, linkat, int, const char *, int, const char *, int)(old, path, new, name, flags);
}

int link(const char *path, const char *name) { return linkat(AT_FDCWD, path, AT_FDCWD, name, 0); }

int symlinkat(const char *target, int directory, const char *name) {
  if (refuse("symlink", is_name_below(directory, name))) return -1;
  return REAL(int, symlinkat, const char *, int, const char *)(target, directory, name);
}

int symlink(const char *target, const char *name) { return symlinkat(target, AT_FDCWD, name); }

int statvfs(const char *path, struct statvfs *space) {
  if (refuse("statvfs", is_name_below(AT_FDCWD, path))) return -1;
  int code = REAL(int, statvfs, const char *, struct statvfs *)(path, space);
  if (is_name_below(AT_FDCWD, path) && find_error("statvfs") == 0)
    space->f_blocks = space->f_bfree = space->f_bavail = 0;
  return code;
}
ALIAS(statvfs64, statvfs);

int fstatvfs(int fd, struct statvfs *space) {
  if (refuse("statvfs", is_open_below(fd))) return -1;
  int code = REAL(int, fstatvfs, int, struct statvfs *)(fd, space);
  if (is_open_below(fd) && find_error("statvfs") == 0)
    space->f_blocks = space->f_bfree = space->f_bavail = 0;
  return code;
}
ALIAS(fstatvfs64, fstatvfs);

// All files have one owner, who is not the user of this process.
uid_t geteuid(void) { return find_error("owner") > 0 ? find_error("owner") + 1 : REAL(uid_t, geteuid, void)(); }

static int change_owner(int code, int is_ours, struct stat *status) {
  if (!code && is_ours && find_error("owner") > 0) status->st_uid = find_error("owner");
  return code;
}

int fstat(int fd, struct stat *status) {
  return change_owner(REAL(int, fstat, int, struct stat *)(fd, status), is_open_below(fd), status);
}
ALIAS(fstat64, fstat);

int fstatat(int directory, const char *path, struct stat *status, int flags) {
  int code = REAL(int, fstatat, int, const char *, struct stat *, int)(directory, path, status, flags);
  return change_owner(code, is_name_below(directory, path), status);
}
ALIAS(fstatat64, fstatat);

int stat(const char *path, struct stat *status) { return fstatat(AT_FDCWD, path, status, 0); }
ALIAS(stat64, stat);

int lstat(const char *path, struct stat *status) {
  return fstatat(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}
ALIAS(lstat64, lstat);

int utimensat(int directory, const char *path, const struct timespec times[2], int flags) {
  if (refuse("utime", is_name_below(directory, path))) return -1;
  return REAL(int, utimensat, int, const char *, const struct timespec *, int)(directory, path, times, flags);
}

int futimens(int fd, const struct timespec times[2]) {
  if (refuse("utime", is_open_below(fd))) return -1;
  return REAL(int, futimens, int, const struct timespec *)(fd, times);
}

int mkdirat(int directory, const char *path, mode_t mode) {
  if (refuse("mkdir", is_name_below(directory, path))) return -1;
  return REAL(int, mkdirat, int, const char *, mode_t)(directory, path, mode);
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int directory, const char *path, int flags) {
  static __thread int count;
  int is_ours = is_name_below(directory, path);
  if (refuse("unlink", is_ours)) return -1;
  // Another program has the file open, for a moment
  int is_busy = is_ours && find_error("unlink_busy") > 0 && count++ % 3 != 2;
  if (is_busy && refuse("unlink_busy", 1)) return -1;
  return REAL(int, unlinkat, int, const char *, int)(directory, path, flags);
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }

int ftruncate(int fd, off_t size) {
  if (refuse("truncate", is_open_below(fd))) return -1;
  return REAL(int, ftruncate, int, off_t)(fd, size);
}
ALIAS(ftruncate64, ftruncate);

// The file is closed, but what was written may be lost.
int close(int fd) {
  int is_ours = is_open_below(fd) && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
  int code = REAL(int, close, int)(fd);
  return refuse("close", is_ours) ? -1 : code;
}

ssize_t write(int fd, const void *data, size_t size) {
  if (refuse("write", is_open_below(fd))) return -1;
  return REAL(ssize_t, write, int, const void *, size_t)(fd, data, size);
}

// Another host has replaced a file: every fifth call.
static int is_stale(const char *path) {
  static int count;
  int is_version = find_error("open_stale") > 0 && strstr(path, ".aimage/version") != NULL;
  return is_version && count++ % 5 == 0 && refuse("open_stale", 1);
}

int openat(int directory, const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  if (refuse(flags & O_CREAT ? "create" : "open", is_name_below(directory, path))) return -1;
  if (is_name_below(directory, path) && is_stale(path)) return -1;
  if (flags & O_DIRECT && refuse("direct", is_name_below(directory, path))) return -1;
  return REAL(int, openat, int, const char *, int, ...)(directory, path, flags, mode);
}
ALIAS(openat64, openat);

int open(const char *path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return openat(AT_FDCWD, path, flags, mode);
}
ALIAS(open64, open);

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  if (refuse("write", is_open_below(fd))) return -1;
  if (fcntl(fd, F_GETFL) & O_DIRECT && refuse("direct_write", is_open_below(fd))) return -1;
  return REAL(ssize_t, pwrite, int, const void *, size_t, off_t)(fd, data, size, offset);
}
ALIAS(pwrite64, pwrite);

// A name cannot be given twice of three times: another program has the file open.
int renameat(int old, const char *path, int new, const char *name) {
  static __thread int count;
  if (is_name_below(new, name) && find_error("rename") > 0 && count++ % 3 != 2)
    if (refuse("rename", 1)) return -1;
  return REAL(int, renameat, int, const char *, int, const char *)(old, path, new, name);
}

int rename(const char *path, const char *name) { return renameat(AT_FDCWD, path, AT_FDCWD, name); }

// Another host has replaced the index: every fifth read.
ssize_t read(int fd, void *data, size_t size) {
  static int count;
  if (refuse("read", is_open_below(fd))) return -1;
  if (find_error("read_stale") > 0) {
    char path[PATH_MAX];
    int is_index = find_path(fd, path) && is_below(path) && strstr(path, "/index.json");
    if (is_index && count++ % 5 == 0 && refuse("read_stale", 1)) return -1;
  }
  return REAL(ssize_t, read, int, void *, size_t)(fd, data, size);
}

ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
  if (refuse("sendfile", is_open_below(from))) return -1;
  return REAL(ssize_t, sendfile, int, int, off_t *, size_t)(to, from, offset, size);
}
ALIAS(sendfile64, sendfile);

int ioctl(int fd, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void *data = va_arg(rest, void *);
  va_end(rest);
  if (request == BLOCK_SHARING && refuse("clone", is_open_below(fd))) return -1;
  return REAL(int, ioctl, int, unsigned long, ...)(fd, request, data);
}

ssize_t copy_file_range(int from, off_t *at, int to, off_t *there, size_t size, unsigned flags) {
  if (refuse("copy_file_range", is_open_below(to))) return -1;
  return REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t, unsigned)(from, at, to, there, size, flags);
}

int fallocate(int fd, int mode, off_t offset, off_t size) {
  if (refuse("fallocate", is_open_below(fd))) return -1;
  return REAL(int, fallocate, int, int, off_t, off_t)(fd, mode, offset, size);
}
ALIAS(fallocate64, fallocate);
