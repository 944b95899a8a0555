// The two Java processes of execution.py, compiled once per Python process: the harness compiles programs and runs their
// tests; the program, in a sandbox of its own, only answers calls. What passes between them are plain values.

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.File;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.io.StringWriter;
import java.lang.reflect.Array;
import java.lang.reflect.Constructor;
import java.lang.reflect.Executable;
import java.lang.reflect.Field;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.AbstractMap;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.Collections;
import java.util.Deque;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.LinkedList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.PriorityQueue;
import java.util.Set;
import java.util.Stack;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.Vector;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import javax.lang.model.element.Element;
import javax.lang.model.element.ElementKind;
import javax.lang.model.element.ExecutableElement;
import javax.lang.model.element.Modifier;
import javax.lang.model.element.TypeElement;
import javax.lang.model.element.TypeParameterElement;
import javax.lang.model.element.VariableElement;
import javax.lang.model.type.TypeKind;
import javax.lang.model.type.TypeMirror;
import javax.lang.model.util.ElementFilter;
import javax.lang.model.util.Elements;
import javax.lang.model.util.Types;
import javax.tools.Diagnostic;
import javax.tools.DiagnosticCollector;
import javax.tools.FileObject;
import javax.tools.ForwardingJavaFileManager;
import javax.tools.JavaCompiler;
import javax.tools.JavaFileManager;
import javax.tools.JavaFileObject;
import javax.tools.SimpleJavaFileObject;
import javax.tools.StandardJavaFileManager;
import javax.tools.StandardLocation;
import javax.tools.ToolProvider;

import com.sun.source.tree.ClassTree;
import com.sun.source.tree.CompilationUnitTree;
import com.sun.source.tree.Tree;
import com.sun.source.util.JavacTask;

// ------------------------------------------------------------------------------------------------- 1. the program
/** Answers calls of class files: NanoRlhfProgram CALLS REPLIES, two pipes. Ends when CALLS does. */
class NanoRlhfProgram {
    private static final Map<Integer, Object> OBJECTS = new HashMap<>(); // what the tests hold a reference to
    private static final Map<Object, Integer> NUMBERS = new java.util.IdentityHashMap<>();

    public static void main(String[] args) throws IOException {
        DataInputStream calls = new DataInputStream(new FileInputStream(args[0]));
        DataOutputStream replies = new DataOutputStream(new FileOutputStream(args[1]));
        PrintStream err = System.err; // the program may replace System.err
        while (true) {
            byte[] call;
            try {
                call = calls.readNBytes(calls.readInt());
            } catch (EOFException end) {
                return;
            }
            byte[] reply;
            try {
                reply = answer(new DataInputStream(new ByteArrayInputStream(call)));
            } catch (Throwable error) {
                Throwable thrown = error instanceof InvocationTargetException ? error.getCause() : error;
                ByteArrayOutputStream bytes = new ByteArrayOutputStream();
                DataOutputStream out = new DataOutputStream(bytes);
                out.writeBoolean(false);
                NanoRlhfValues.writeText(out, thrown.getClass().getName());
                NanoRlhfValues.writeText(out, messageOf(thrown));
                reply = bytes.toByteArray();
                try {
                    thrown.printStackTrace(err);
                } catch (Throwable another) { // from a method of the program's own exception
                    err.println(thrown.getClass().getName());
                }
            }
            replies.writeInt(reply.length);
            replies.write(reply);
        }
    }

    private static String messageOf(Throwable thrown) {
        try {
            return String.valueOf(thrown.getMessage());
        } catch (Throwable another) {
            return "";
        }
    }

    /** A call: class, name, types, target, arguments. A reply: true, value, and the arguments as they are afterwards. */
    private static byte[] answer(DataInputStream in) throws Throwable {
        Class<?> owner = Class.forName(NanoRlhfValues.readText(in), true, NanoRlhfProgram.class.getClassLoader());
        String name = NanoRlhfValues.readText(in);
        int numTypes = in.readInt(); // -1: a field
        List<String> types = new ArrayList<>();
        for (int i = 0; i < numTypes; i++) {
            types.add(NanoRlhfValues.readText(in));
        }
        Object target = NanoRlhfValues.read(in, (number, type) -> OBJECTS.get(number));
        Object[] arguments = (Object[]) NanoRlhfValues.read(in, (number, type) -> OBJECTS.get(number));
        Object value;
        if (numTypes < 0) {
            Field field = owner.getDeclaredField(name);
            field.setAccessible(true);
            value = field.get(target);
        } else if (name.equals("<init>")) {
            Constructor<?> constructor = (Constructor<?>) find(owner.getDeclaredConstructors(), null, types);
            value = constructor.newInstance(arguments);
        } else {
            value = ((Method) find(owner.getDeclaredMethods(), name, types)).invoke(target, arguments);
        }
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        DataOutputStream out = new DataOutputStream(bytes);
        out.writeBoolean(true);
        NanoRlhfValues.write(out, value, NanoRlhfProgram::numberOf);
        NanoRlhfValues.write(out, arguments, NanoRlhfProgram::numberOf);
        return bytes.toByteArray();
    }

    private static Executable find(Executable[] all, String name, List<String> types) throws NoSuchMethodException {
        for (Executable one : all) {
            List<String> own = Arrays.stream(one.getParameterTypes()).map(Class::getCanonicalName).toList();
            boolean bridge = one instanceof Method method && method.isBridge();
            if ((name == null || one.getName().equals(name)) && own.equals(types) && !bridge) {
                one.setAccessible(true);
                return one;
            }
        }
        throw new NoSuchMethodException(name + types);
    }

    private static int numberOf(Object object) {
        return NUMBERS.computeIfAbsent(object, o -> {
            OBJECTS.put(NUMBERS.size(), o);
            return NUMBERS.size();
        });
    }
}

// ------------------------------------------------------------------------------------------------- 2. plain values
/**
 * Plain values as bytes: numbers, strings, arrays and java.util's collections, each by its type. Anything else is
 * written as a number that stands for the object. A subclass is written as the class of java.util that it extends: the
 * reader makes values of its own, and runs no code of the writer's.
 */
class NanoRlhfValues {
    interface Read {
        Object object(int number, String type);
    }

    interface Write {
        int number(Object object) throws IOException;
    }

    private static final Set<String> KINDS = Set.of(
        "java.util.ArrayList", "java.util.Arrays$ArrayList", "java.util.LinkedList", "java.util.Vector", "java.util.Stack",
        "java.util.ImmutableCollections$AbstractImmutableList", "java.util.HashMap", "java.util.LinkedHashMap",
        "java.util.TreeMap", "java.util.HashSet", "java.util.LinkedHashSet", "java.util.TreeSet", "java.util.ArrayDeque",
        "java.util.PriorityQueue", "java.util.ImmutableCollections$AbstractImmutableMap");

    static void writeText(DataOutputStream out, String text) throws IOException {
        byte[] bytes = text.getBytes(StandardCharsets.UTF_16BE); // of any string, unlike UTF-8
        if (hasLoneSurrogate(text)) { // getBytes would replace it
            bytes = new byte[2 * text.length()];
            for (int i = 0; i < text.length(); i++) {
                bytes[2 * i] = (byte) (text.charAt(i) >> 8);
                bytes[2 * i + 1] = (byte) text.charAt(i);
            }
        }
        out.writeInt(bytes.length);
        out.write(bytes);
    }

    private static boolean hasLoneSurrogate(String text) {
        return text.codePoints().anyMatch(c -> c >= 0xD800 && c < 0xE000);
    }

    static String readText(DataInputStream in) throws IOException {
        byte[] bytes = in.readNBytes(in.readInt());
        char[] characters = new char[bytes.length / 2];
        for (int i = 0; i < characters.length; i++) {
            characters[i] = (char) ((bytes[2 * i] & 0xFF) << 8 | bytes[2 * i + 1] & 0xFF);
        }
        return new String(characters);
    }

    private static String kindOf(Object collection) {
        Class<?> type = collection.getClass();
        while (type != null && !KINDS.contains(type.getName())) {
            type = type.getSuperclass();
        }
        return type == null ? "" : type.getName();
    }

    static void write(DataOutputStream out, Object value, Write others) throws IOException {
        if (value == null) {
            out.writeByte('n');
        } else if (value instanceof Boolean v) {
            out.writeByte('z');
            out.writeBoolean(v);
        } else if (value instanceof Byte v) {
            out.writeByte('b');
            out.writeByte(v);
        } else if (value instanceof Short v) {
            out.writeByte('s');
            out.writeShort(v);
        } else if (value instanceof Character v) {
            out.writeByte('c');
            out.writeChar(v);
        } else if (value instanceof Integer v) {
            out.writeByte('i');
            out.writeInt(v);
        } else if (value instanceof Long v) {
            out.writeByte('l');
            out.writeLong(v);
        } else if (value instanceof Float v) {
            out.writeByte('f');
            out.writeInt(Float.floatToRawIntBits(v));
        } else if (value instanceof Double v) {
            out.writeByte('d');
            out.writeLong(Double.doubleToRawLongBits(v));
        } else if (value instanceof String v) {
            out.writeByte('S');
            writeText(out, v);
        } else if (value.getClass() == BigInteger.class) {
            out.writeByte('I');
            writeText(out, value.toString());
        } else if (value.getClass() == BigDecimal.class) {
            out.writeByte('D');
            writeText(out, ((BigDecimal) value).unscaledValue().toString());
            out.writeInt(((BigDecimal) value).scale());
        } else if (value.getClass().isArray() && plain(value.getClass())) {
            out.writeByte('[');
            writeText(out, value.getClass().getComponentType().descriptorString());
            int length = Array.getLength(value);
            out.writeInt(length);
            for (int i = 0; i < length; i++) {
                write(out, Array.get(value, i), others);
            }
        } else if (value instanceof List || value instanceof Set || value instanceof ArrayDeque || value instanceof PriorityQueue) {
            out.writeByte(value instanceof List ? 'L' : value instanceof Set ? 'T' : 'Q');
            writeText(out, kindOf(value));
            Object[] items = ((Collection<?>) value).toArray();
            out.writeInt(items.length);
            for (Object item : items) {
                write(out, item, others);
            }
        } else if (value instanceof Map<?, ?> v) {
            out.writeByte('M');
            writeText(out, kindOf(value));
            List<Object> items = new ArrayList<>();
            for (Map.Entry<?, ?> entry : v.entrySet()) {
                items.add(entry.getKey());
                items.add(entry.getValue());
            }
            out.writeInt(items.size());
            for (Object item : items) {
                write(out, item, others);
            }
        } else if (value instanceof Map.Entry<?, ?> v) {
            out.writeByte('E');
            write(out, v.getKey(), others);
            write(out, v.getValue(), others);
        } else if (value instanceof Optional<?> v) {
            out.writeByte('O');
            write(out, v.orElse(null), others);
        } else {
            int number = others.number(value);
            out.writeByte('R');
            out.writeInt(number);
            writeText(out, value.getClass().getName());
        }
    }

    private static boolean plain(Class<?> array) {
        Class<?> type = array.getComponentType();
        return type.isArray() ? plain(type) : type.getClassLoader() == null; // the JDK's
    }

    static Object read(DataInputStream in, Read others) throws IOException {
        int tag = in.readByte();
        switch (tag) {
            case 'n': return null;
            case 'z': return in.readBoolean();
            case 'b': return in.readByte();
            case 's': return in.readShort();
            case 'c': return in.readChar();
            case 'i': return in.readInt();
            case 'l': return in.readLong();
            case 'f': return Float.intBitsToFloat(in.readInt());
            case 'd': return Double.longBitsToDouble(in.readLong());
            case 'S': return readText(in).intern(); // as the literals in the tests: programs compare them by ==
            case 'I': return new BigInteger(readText(in));
            case 'D': return new BigDecimal(new BigInteger(readText(in)), in.readInt());
            case 'E': return new AbstractMap.SimpleEntry<>(read(in, others), read(in, others));
            case 'O': return Optional.ofNullable(read(in, others));
            case 'R': return others.object(in.readInt(), readText(in));
            case '[': {
                Class<?> type = component(readText(in));
                int length = in.readInt();
                if (length > in.available()) { // each item takes a byte or more
                    throw new IOException("an array of " + length + " items");
                }
                Object array = Array.newInstance(type, length);
                for (int i = 0; i < length; i++) {
                    Array.set(array, i, read(in, others));
                }
                return array;
            }
            case 'L': case 'T': case 'Q': case 'M': {
                String kind = readText(in);
                int length = in.readInt();
                List<Object> items = new ArrayList<>();
                for (int i = 0; i < length; i++) {
                    items.add(read(in, others));
                }
                return tag == 'M' ? map(kind, items) : collection(tag, kind, items);
            }
            default: throw new IOException("a value of type " + tag);
        }
    }

    private static Class<?> component(String descriptor) throws IOException {
        try {
            return Class.forName("[" + descriptor.replace('/', '.'), false, null).getComponentType();
        } catch (ClassNotFoundException error) {
            throw new IOException(error);
        }
    }

    private static Collection<Object> collection(int tag, String kind, List<Object> items) {
        switch (kind) {
            case "java.util.Arrays$ArrayList": return Arrays.asList(items.toArray());
            case "java.util.LinkedList": return new LinkedList<>(items);
            case "java.util.Vector": return new Vector<>(items);
            case "java.util.Stack": {
                Stack<Object> stack = new Stack<>();
                stack.addAll(items);
                return stack;
            }
            case "java.util.ImmutableCollections$AbstractImmutableList": return Collections.unmodifiableList(items);
            case "java.util.HashSet": return new HashSet<>(items);
            case "java.util.TreeSet": return new TreeSet<>(items);
            case "java.util.ArrayDeque": return new ArrayDeque<>(items);
            case "java.util.PriorityQueue": return new PriorityQueue<>(items);
            default: return tag == 'L' ? items : tag == 'T' ? new LinkedHashSet<>(items) : new ArrayDeque<>(items);
        }
    }

    private static Map<Object, Object> map(String kind, List<Object> items) {
        Map<Object, Object> map = new LinkedHashMap<>();
        for (int i = 0; i + 1 < items.size(); i += 2) {
            map.put(items.get(i), items.get(i + 1));
        }
        switch (kind) {
            case "java.util.HashMap": return new HashMap<>(map);
            case "java.util.TreeMap": return new TreeMap<>(map);
            case "java.util.ImmutableCollections$AbstractImmutableMap": return Collections.unmodifiableMap(map);
            default: return map;
        }
    }

    /** After a call: give a value that the tests passed the content that the program has left in it. */
    @SuppressWarnings("unchecked")
    static void restore(Object mine, Object after) {
        if (mine == null || after == null || mine.equals(after)) {
            return;
        }
        if (mine.getClass().isArray() && mine.getClass() == after.getClass()) {
            for (int i = 0; i < Math.min(Array.getLength(mine), Array.getLength(after)); i++) {
                Object old = Array.get(mine, i);
                if (old != null && old.getClass().isArray()) {
                    restore(old, Array.get(after, i));
                } else {
                    Array.set(mine, i, Array.get(after, i));
                }
            }
        } else if (mine instanceof List && after instanceof List && ((List<?>) mine).size() == ((List<?>) after).size()) {
            for (int i = 0; i < ((List<Object>) mine).size(); i++) { // Arrays.asList has a fixed size
                ((List<Object>) mine).set(i, ((List<Object>) after).get(i));
            }
        } else if (mine instanceof Collection && after instanceof Collection) {
            ((Collection<Object>) mine).clear();
            ((Collection<Object>) mine).addAll((Collection<Object>) after);
        } else if (mine instanceof Map && after instanceof Map) {
            ((Map<Object, Object>) mine).clear();
            ((Map<Object, Object>) mine).putAll((Map<Object, Object>) after);
        }
    }
}

// -------------------------------------------------------------------------------------------------- 3. the harness
/**
 * Compiles one program after another and runs their tests. All messages are framed by their length.
 *
 *   in    compile: directory for the class files, program, tests, their imports, the classes that the tests may call
 *   out   'c', nothing or javac's messages; if there are some, that is all
 *   in    an empty message: run the tests; another one: don't, the program has failed before
 *   out   'q', a call for the program                                     } any number of times
 *   in    the program's reply, or nothing if it has ended                 }
 *   out   'v', the verdict, a line feed, the tests' output
 */
class NanoRlhfHarness {
    private static final int TAIL = 8000; // characters of the tests' output
    private static final Pattern NAME = Pattern.compile("(?<![\\w.$])[A-Za-z_$][\\w$]*");
    private static DataInputStream in;
    private static DataOutputStream out;

    public static void main(String[] args) throws IOException {
        in = new DataInputStream(System.in);
        out = new DataOutputStream(new FileOutputStream(FileDescriptor.out));
        NanoRlhfHarness compiler = new NanoRlhfHarness(new File(args[0]));
        while (true) { // until the input ends: EOFException
            String[] request = new String[5];
            for (int i = 0; i < request.length; i++) {
                request[i] = new String(receive(), StandardCharsets.UTF_8);
            }
            Map<String, byte[]> classes = new HashMap<>();
            String problem = compiler.compile(new File(request[0]), request[1], request[2], request[3], request[4], classes);
            send('c', problem);
            if (problem.isEmpty() && receive().length == 0) {
                send('v', run(classes));
            }
        }
    }

    static byte[] ask(byte[] call) throws IOException {
        send('q', call);
        byte[] reply = receive();
        if (reply.length == 0) {
            throw new NanoRlhfTests.Ended();
        }
        return reply;
    }

    private static byte[] receive() throws IOException {
        return in.readNBytes(in.readInt());
    }

    private static void send(char kind, String text) throws IOException {
        send(kind, text.getBytes(StandardCharsets.UTF_8));
    }

    private static synchronized void send(char kind, byte[] content) throws IOException {
        out.writeByte(kind);
        out.writeInt(content.length);
        out.write(content);
        out.flush();
    }

    // ------------------------------------------------------------------------------------------------ 3.1 the tests
    private static String run(Map<String, byte[]> classes) {
        ClassLoader loader = new ClassLoader(NanoRlhfHarness.class.getClassLoader()) {
            @Override protected Class<?> findClass(String name) throws ClassNotFoundException {
                byte[] code = classes.get(name);
                if (code == null) {
                    throw new ClassNotFoundException(name);
                }
                return defineClass(name, code, 0, code.length);
            }
        };
        NanoRlhfTests.begin(loader);
        Tail tail = new Tail();
        PrintStream stdout = System.out, stderr = System.err;
        PrintStream captured = new PrintStream(tail, true, StandardCharsets.UTF_8);
        System.setOut(captured);
        System.setErr(captured);
        Throwable thrown = null;
        try {
            Method main = Class.forName("Main", true, loader).getMethod("main", String[].class);
            main.setAccessible(true);
            main.invoke(null, (Object) new String[0]);
        } catch (InvocationTargetException error) {
            thrown = error.getCause();
        } catch (Throwable error) {
            thrown = error;
        } finally {
            System.setOut(stdout);
            System.setErr(stderr);
        }
        if (thrown instanceof ExceptionInInitializerError error && error.getCause() != null) {
            thrown = error.getCause();
        }
        String word = "passed";
        if (thrown instanceof OutOfMemoryError) {
            word = "memory";
        } else if (thrown != null) {
            word = isVerdict(thrown) ? "wrong_answer" : "exception";
            if (thrown != NanoRlhfTests.raised) { // the program has printed its own
                StackTraceElement[] frames = thrown.getStackTrace();
                thrown.setStackTrace(
                    Arrays.stream(frames).filter(f -> f.getClassName().startsWith("Main")).toArray(StackTraceElement[]::new));
                thrown.printStackTrace(captured);
            }
        } else if (NanoRlhfTests.failures > 0) {
            word = "wrong_answer";
        }
        captured.flush();
        return word + "\n" + tail;
    }

    /** Whether a test threw for a wrong answer; if not, the program crashed. */
    private static boolean isVerdict(Throwable thrown) {
        StackTraceElement[] frames = thrown.getStackTrace();
        boolean byTheTest = frames.length > 0 && frames[0].getClassName().equals("Main");
        return byTheTest && (thrown.getClass() == Exception.class || thrown.getClass() == AssertionError.class);
    }

    /** Keeps the end of what is written. */
    private static class Tail extends OutputStream {
        private final byte[] kept = new byte[TAIL];
        private long size;

        @Override public synchronized void write(int b) {
            kept[(int) (size++ % TAIL)] = (byte) b;
        }

        @Override public synchronized String toString() {
            byte[] bytes = new byte[(int) Math.min(size, TAIL)];
            for (int i = 0; i < bytes.length; i++) {
                bytes[i] = kept[(int) ((size - bytes.length + i) % TAIL)];
            }
            return new String(bytes, StandardCharsets.UTF_8);
        }
    }

    // --------------------------------------------------------------------------------------------- 3.2 the compiler
    private final JavaCompiler javac = ToolProvider.getSystemJavaCompiler();
    private final StandardJavaFileManager files = javac.getStandardFileManager(null, null, StandardCharsets.UTF_8);
    private final List<String> options = List.of("-proc:none", "-nowarn", "-implicit:none");
    private final File launcher;

    private NanoRlhfHarness(File launcher) {
        this.launcher = launcher;
    }

    /**
     * Compile a program by itself, to a directory, then its tests against stubs of its classes, to memory: no text of the
     * program reaches the compilation of the tests, only the signatures of its methods. Returns "" or javac's messages.
     */
    private String compile(
        File directory, String program, String tests, String imports, String callable, Map<String, byte[]> classes
    ) throws IOException {
        DiagnosticCollector<JavaFileObject> found = new DiagnosticCollector<>();
        StringWriter crash = new StringWriter(); // what javac prints besides its diagnostics
        files.setLocation(StandardLocation.CLASS_PATH, List.of());
        files.setLocation(StandardLocation.CLASS_OUTPUT, List.of(directory));
        JavacTask task = (JavacTask) javac.getTask(crash, files, found, options, null, List.of(new Source("Main", program)));
        List<String> own = new ArrayList<>(); // the program's top-level classes
        for (CompilationUnitTree unit : task.parse()) {
            for (Tree declared : unit.getTypeDecls()) {
                if (declared instanceof ClassTree type) {
                    own.add(type.getSimpleName().toString());
                }
            }
        }
        task.analyze();
        String problem = problems(found, crash, "");
        String stubs = "";
        if (problem.isEmpty()) { // before `generate`, after which javac has forgotten the classes
            stubs = stubs(task.getElements(), task.getTypes(), own, tests, imports, Set.copyOf(List.of(callable.split(" "))));
            task.generate();
            problem = problems(found, crash, "");
        }
        if (!problem.isEmpty()) {
            return problem;
        }
        Matcher declared = Pattern.compile("\\bclass\\s+([\\w$]+)").matcher(tests);
        while (declared.find()) {
            if (own.contains(declared.group(1))) {
                return "error: duplicate class: " + declared.group(1) + ", the tests have one of this name";
            }
        }

        files.setLocation(StandardLocation.CLASS_PATH, List.of(launcher));
        DiagnosticCollector<JavaFileObject> more = new DiagnosticCollector<>();
        StringWriter another = new StringWriter();
        List<Source> sources = List.of(new Source("Main", imports + "\n" + tests), new Source("Stubs", stubs));
        javac.getTask(another, new InMemory(files, classes), more, options, null, sources).call();
        return problems(more, another, "the tests don't fit the program: ");
    }

    private static String problems(DiagnosticCollector<JavaFileObject> found, StringWriter crash, String prefix) {
        StringBuilder messages = new StringBuilder();
        for (Diagnostic<?> diagnostic : found.getDiagnostics()) {
            if (diagnostic.getKind() == Diagnostic.Kind.ERROR) {
                messages.append(prefix).append(diagnostic).append('\n');
            }
        }
        if (messages.isEmpty() && !crash.toString().isEmpty()) {
            throw new IllegalStateException(crash.toString()); // out of memory or stack, or a bug in javac
        }
        return messages.toString();
    }

    /**
     * Classes with the names and signatures of those that the tests mention, whose methods ask the program. A class with
     * a name of java.lang or of the tests' imports gets none, unless the problem itself declares it: the tests' Math is
     * the JDK's.
     */
    private static String stubs(
        Elements elements, Types types, List<String> own, String tests, String imports, Set<String> callable
    ) {
        Map<String, TypeElement> open = new LinkedHashMap<>();
        Set<String> closed = new HashSet<>();
        for (String name : own) {
            boolean ours = name.startsWith("NanoRlhf") || name.equals("java") || name.equals("javax");
            if (ours || !callable.contains(name) && isOfTheJdk(elements, name, imports)) {
                closed.add(name);
            } else {
                open.put(name, elements.getTypeElement(name));
            }
        }
        open.values().removeIf(element -> element == null); // in a package
        StringBuilder text = new StringBuilder();
        Deque<String> todo = new ArrayDeque<>(namesIn(tests, open.keySet()));
        Set<String> done = new HashSet<>(todo);
        while (!todo.isEmpty()) {
            String stub = stub(open.get(todo.poll()), types, closed, false);
            text.append(stub);
            for (String name : namesIn(stub, open.keySet())) {
                if (done.add(name)) {
                    todo.add(name);
                }
            }
        }
        return text.toString();
    }

    private static boolean isOfTheJdk(Elements elements, String name, String imports) {
        List<String> packages = new ArrayList<>(List.of("java.lang"));
        Matcher imported = Pattern.compile("import\\s+(?:static\\s+)?([\\w.]+)\\.(\\*|\\w+)\\s*;").matcher(imports);
        while (imported.find()) {
            if (imported.group(2).equals(name)) {
                return true;
            }
            packages.add(imported.group(1));
        }
        return packages.stream().anyMatch(p -> elements.getTypeElement(p + "." + name) != null);
    }

    private static List<String> namesIn(String text, Set<String> among) {
        return NAME.matcher(text).results().map(match -> match.group()).filter(among::contains).distinct().toList();
    }

    private static String stub(TypeElement type, Types types, Set<String> closed, boolean nested) {
        String name = type.getSimpleName().toString();
        StringBuilder text = new StringBuilder(nested ? "public static class " : "class ").append(name);
        text.append(parameters(type.getTypeParameters())).append(" extends NanoRlhfTests.Remote {\n");
        text.append(name).append("(NanoRlhfTests.Handle handle) { super(handle); }\n");
        String owner = "\"" + binaryName(type) + "\"";
        for (ExecutableElement method : ElementFilter.constructorsIn(type.getEnclosedElements())) {
            boolean inner = type.getNestingKind().isNested() && !type.getModifiers().contains(Modifier.STATIC);
            if (isVisible(method) && !inner && type.getKind() == ElementKind.CLASS) {
                String head = name + "(" + declared(method) + ")" + thrown(method);
                if (namesIn(head, closed).isEmpty()) {
                    text.append(head).append(" { super(NanoRlhfTests.create(").append(owner).append(", ");
                    text.append(erased(method, types)).append(arguments(method)).append(")); }\n");
                }
            }
        }
        for (ExecutableElement method : ElementFilter.methodsIn(type.getEnclosedElements())) {
            String called = method.getSimpleName().toString();
            int count = method.getParameters().size();
            boolean identity = called.equals("equals") && count == 1 || called.equals("hashCode") && count == 0;
            boolean ofObject = Set.of("getClass", "finalize", "clone", "wait", "notify", "notifyAll").contains(called);
            String result = method.getReturnType().toString();
            boolean isStatic = method.getModifiers().contains(Modifier.STATIC);
            String head = (isStatic ? "static " : "") + parameters(method.getTypeParameters()) + " " + result + " " + called
                + "(" + declared(method) + ")" + thrown(method);
            if (!isVisible(method) || identity || ofObject || !namesIn(head, closed).isEmpty()) {
                continue;
            }
            text.append("@SuppressWarnings(\"unchecked\") public ").append(head).append(" { ");
            text.append(method.getReturnType().getKind() == TypeKind.VOID ? "" : "return (" + result + ") ");
            text.append("NanoRlhfTests.call(").append(owner).append(", \"").append(called).append("\", ");
            text.append(erased(method, types)).append(", ").append(isStatic ? "null" : "this");
            text.append(arguments(method)).append("); }\n");
        }
        for (VariableElement field : ElementFilter.fieldsIn(type.getEnclosedElements())) {
            String head = field.asType() + " " + field.getSimpleName();
            if (isVisible(field) && field.getModifiers().contains(Modifier.STATIC) && namesIn(head, closed).isEmpty()) {
                text.append("public static ").append(head).append(" = (").append(field.asType()).append(") ");
                text.append("NanoRlhfTests.call(").append(owner).append(", \"").append(field.getSimpleName());
                text.append("\", null, null);\n");
            }
        }
        for (TypeElement inner : ElementFilter.typesIn(type.getEnclosedElements())) {
            if (isVisible(inner)) {
                text.append(stub(inner, types, closed, true));
            }
        }
        return text.append("}\n").toString();
    }

    private static boolean isVisible(Element element) {
        return !element.getModifiers().contains(Modifier.PRIVATE);
    }

    private static String binaryName(TypeElement type) {
        String name = type.getSimpleName().toString();
        return type.getEnclosingElement() instanceof TypeElement outer ? binaryName(outer) + "$" + name : name;
    }

    private static String parameters(List<? extends TypeParameterElement> parameters) {
        if (parameters.isEmpty()) {
            return "";
        }
        return parameters.stream().map(p -> p + p.getBounds().stream().map(TypeMirror::toString)
            .collect(Collectors.joining(" & ", " extends ", ""))).collect(Collectors.joining(", ", "<", ">"));
    }

    private static String declared(ExecutableElement method) {
        List<String> parts = new ArrayList<>();
        for (VariableElement parameter : method.getParameters()) {
            parts.add(parameter.asType() + " a" + parts.size());
        }
        if (method.isVarArgs()) {
            int last = parts.size() - 1;
            parts.set(last, parts.get(last).replaceFirst("\\[\\] (a\\d+)$", "... $1"));
        }
        return String.join(", ", parts);
    }

    /** Only the JDK's exceptions: those of the program arrive as unchecked ones. */
    private static String thrown(ExecutableElement method) {
        String jdk = method.getThrownTypes().stream().map(TypeMirror::toString).filter(t -> t.contains("."))
            .collect(Collectors.joining(", "));
        return jdk.isEmpty() ? "" : " throws " + jdk;
    }

    private static String erased(ExecutableElement method, Types types) {
        return method.getParameters().stream().map(p -> "\"" + types.erasure(p.asType()) + "\"")
            .collect(Collectors.joining(", ", "new String[] {", "}"));
    }

    /** As one array, so that an argument that is an array itself isn't taken for the arguments. */
    private static String arguments(ExecutableElement method) {
        StringBuilder text = new StringBuilder(", new Object[] {");
        for (int i = 0; i < method.getParameters().size(); i++) {
            text.append(i > 0 ? ", a" : "a").append(i);
        }
        return text.append("}").toString();
    }

    private static class Source extends SimpleJavaFileObject {
        private final String text;

        Source(String name, String text) {
            super(URI.create("string:///" + name + ".java"), Kind.SOURCE);
            this.text = text;
        }

        @Override public CharSequence getCharContent(boolean ignoreEncodingErrors) {
            return text;
        }
    }

    private static class InMemory extends ForwardingJavaFileManager<StandardJavaFileManager> {
        private final Map<String, byte[]> classes;

        InMemory(StandardJavaFileManager files, Map<String, byte[]> classes) {
            super(files);
            this.classes = classes;
        }

        @Override public JavaFileObject getJavaFileForOutput(
            JavaFileManager.Location location, String name, JavaFileObject.Kind kind, FileObject sibling
        ) {
            return new SimpleJavaFileObject(URI.create("memory:///" + name.replace('.', '/') + kind.extension), kind) {
                @Override public OutputStream openOutputStream() {
                    return new ByteArrayOutputStream() {
                        @Override public void close() {
                            classes.put(name, toByteArray());
                        }
                    };
                }
            };
        }
    }
}
